"""The moments of a step, against sums by hand on a model of two units."""

from dataclasses import replace

import pytest

from zero_core import ZeroConfig
from zero_core.planner.formulas import model_state_bytes
from zero_core.planner.profile import (
    BatchShape,
    Bytes,
    ModelProfile,
    Moment,
    ParameterProfile,
    Phase,
    Timeline,
    UnitProfile,
)
from zero_core.planner.step import HEAP_FACTOR, StepBytes, resident_peak, step_moments, step_peak

SHAPE = BatchShape.padded(1, 10, 10)
A, B = 1000, 3200
"""Elements of the units."""


def unit(name: str, elements: int, *, trainable: bool = True, stored: str = "float32") -> UnitProfile:
    parameter = ParameterProfile(f"{name}.weight", (elements,), stored, trainable, linear=True)
    return UnitProfile(name, (parameter,), Bytes(), Bytes())


def moment(name: str, phase: Phase, live: int) -> Moment:
    return Moment(name, phase, (Bytes(per_token=live / 10),))


TIMELINE = Timeline(
    packed=False,
    checkpointed=False,
    moments=(
        moment("a", "forward", 100),
        moment("b", "forward", 900),
        moment("b", "backward", 1000),
        moment("a", "backward", 200),
    ),
)
PROFILE = ModelProfile(
    model="",
    method="supervised",
    lora=None,
    precision="fp32",
    device="cpu",
    vocabulary=10,
    hidden=1,
    buffer_bytes=0,
    units=(unit("a", A), unit("b", B)),
    timelines=(TIMELINE,),
)


def moments(config: ZeroConfig, ranks: int, profile: ModelProfile = PROFILE) -> list[StepBytes]:
    return list(step_moments(profile, config, ranks, TIMELINE, SHAPE))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_there_for_the_update_is_the_closed_formula(stage: int) -> None:
    update = moments(ZeroConfig(stage=stage), 2)[-1]
    states = model_state_bytes(A + B, 2, stage, "fp32")
    assert (update.parameters, update.gradients, update.optimizer) == tuple(states.values())
    assert update.activations == 0


def test_gradients_come_as_backward_goes() -> None:
    gradients = [each.gradients for each in moments(ZeroConfig(stage=0), 2)]
    assert gradients == [0, 0, 4 * B, 4 * (A + B), 4 * (A + B)]
    # At stage 2 the last unit's is on its way to the shards while the next one's is made.
    assert [each.gradients for each in moments(ZeroConfig(stage=2), 2)] == [
        0, 0, 4 * B, 4 * (A + B), 4 * (A + B) // 2,
    ]  # fmt: skip


def test_stage_3_has_the_unit_at_work_and_the_next() -> None:
    shards = 4 * (A + B) // 2
    assert [each.parameters - shards for each in moments(ZeroConfig(stage=3), 2)] == [
        4 * (A + B), 4 * B, 4 * (A + B), 4 * A, 0,
    ]  # fmt: skip


def test_one_rank_shards_nothing() -> None:
    assert moments(ZeroConfig(stage=3), 1) == moments(ZeroConfig(stage=0), 1)


def test_earlier_micro_batches_leave_their_gradients_in_fp32() -> None:
    profile = replace(PROFILE, precision="bf16")
    config = ZeroConfig(stage=0, precision="bf16", gradient_accumulation_steps=2)
    assert {each.gradients for each in moments(config, 2, profile)} == {4 * (A + B)}


def test_frozen_units_are_kept_packed_and_brought_for_use() -> None:
    profile = replace(PROFILE, units=(unit("a", A), unit("b", B, trainable=False)))
    config = ZeroConfig(stage=0, frozen_quantization="int8")
    found = moments(config, 2, profile)
    kept = 4 * A + B * 17 // 16
    assert [each.parameters - kept for each in found] == [4 * B, 4 * B, 4 * B, 0, 0]
    assert {each.optimizer for each in found} == {8 * A}
    as_stored = replace(PROFILE, units=(unit("a", A), unit("b", B, trainable=False, stored="bfloat16")))
    assert moments(ZeroConfig(stage=0), 2, as_stored)[-1].parameters == 4 * A + 2 * B


def test_the_peak_is_the_fullest_moment() -> None:
    peak = step_peak(PROFILE, ZeroConfig(stage=0), 2, TIMELINE, SHAPE)
    assert peak == max(moments(ZeroConfig(stage=0), 2), key=lambda each: each.total)
    assert peak.activations == 200


def test_on_the_cpu_what_was_taken_stays() -> None:
    resident = resident_peak(PROFILE, ZeroConfig(stage=0), 2, TIMELINE, SHAPE)
    assert resident == 4 * (A + B) + 8 * (A + B) + 4 * (A + B) + round(HEAP_FACTOR * 1000)
