import json

import pytest

from zero_core.planner.profile import (
    BatchShape,
    Bytes,
    InvalidProfile,
    LoraShape,
    ModelProfile,
    Moment,
    ParameterProfile,
    Timeline,
    UnitProfile,
)

PROFILE = ModelProfile(
    model="sha256:1",
    method="supervised",
    lora=LoraShape(8, ("q_proj",), (), ("lm_head",), "nf4"),
    precision="bf16",
    device="cpu",
    vocabulary=1000,
    hidden=64,
    buffer_bytes=128,
    units=(
        UnitProfile(
            "embed",
            (ParameterProfile("embed.weight", (1000, 64), "bfloat16", True, False, ("lm_head.weight",)),),
            Bytes(per_token=8.0),
            Bytes(per_token=8.0),
        ),
    ),
    timelines=(
        Timeline(
            packed=False,
            checkpointed=False,
            moments=(
                Moment("embed", "forward", (Bytes(per_token=100.0), Bytes(per_pair=2.0, constant=64.0))),
                Moment("embed", "backward", (Bytes(per_token=50.0),)),
            ),
        ),
    ),
)


def test_a_profile_survives_json() -> None:
    assert ModelProfile.from_json(PROFILE.to_json()) == PROFILE
    without = ModelProfile.from_json(json.dumps(json.loads(PROFILE.to_json()) | {"lora": None}))
    assert without.lora is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1}', '{"version": 99}', "null"])
def test_what_is_no_profile_is_refused(text: str) -> None:
    with pytest.raises(InvalidProfile, match="record the model again"):
        ModelProfile.from_json(text)


def test_a_moment_takes_the_largest_of_its_polynomials() -> None:
    timeline = PROFILE.timeline(packed=True, checkpointed=False)
    assert timeline.peak(BatchShape.padded(2, 10, 20)) == 100 * 20
    assert timeline.peak(BatchShape.padded(2, 100, 200)) == 2 * 2 * 100**2 + 64
    assert timeline.peak(BatchShape.packed([100, 10], 20)) == 2 * (100**2 + 10**2) + 64
    assert timeline.forward_order() == ("embed",)


def test_pieces_of_logits_are_even() -> None:
    assert PROFILE.targets_at_once(5, logits_bytes=10 * 4000) == 5
    assert PROFILE.targets_at_once(21, logits_bytes=10 * 4000) == 7
    assert PROFILE.targets_at_once(3, logits_bytes=1) == 1
