"""The formula against the figures that were published with it."""

from dataclasses import dataclass

import pytest

from zero_core.planner.formulas import STORED_BYTES, model_state_bytes, unit_bytes

GB = 1e9


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_a_rank_of_64_holds_what_figure_1_of_the_paper_says(stage: int, gigabytes: float) -> None:
    total = sum(model_state_bytes(7_500_000_000, 64, stage, "bf16").values())
    assert total / GB == pytest.approx(gigabytes, abs=0.05)


def test_gpt3_on_128_ranks_takes_21_9_gigabytes_each() -> None:
    total = sum(model_state_bytes(175_000_000_000, 128, 3, "bf16").values())
    assert total / GB == pytest.approx(21.9, abs=0.05)


@pytest.mark.parametrize(
    ("stage", "expected"),
    [(0, (400, 400, 800)), (1, (400, 400, 400)), (2, (400, 200, 400)), (3, (200, 200, 400))],
)
def test_in_fp32_the_parameters_are_their_own_masters(stage: int, expected: tuple[int, int, int]) -> None:
    found = model_state_bytes(100, 2, stage, "fp32")
    assert (found["parameters"], found["gradients"], found["optimizer"]) == expected


# Frozen.


def test_frozen_elements_take_their_storage_and_no_other_state() -> None:
    alone = model_state_bytes(100, 2, 3, "bf16")
    with_base = model_state_bytes(100, 2, 3, "bf16", {"nf4": 6400, "int8": 640, "bf16": 10, "fp32": 10})
    assert with_base["parameters"] - alone["parameters"] == (3600 + 680 + 20 + 40) / 2
    assert (with_base["gradients"], with_base["optimizer"]) == (alone["gradients"], alone["optimizer"])
    whole = model_state_bytes(100, 2, 2, "bf16", {"nf4": 6400})
    assert whole["parameters"] == 200 + 3600


def test_a_unit_is_gathered_at_stage_3_and_elsewhere_decoded() -> None:
    assert unit_bytes("bf16", 3, trainable=10, frozen={"nf4": 64, "bf16": 5}) == 2 * (10 + 64 + 5)
    assert unit_bytes("bf16", 2, trainable=10, frozen={"nf4": 64, "bf16": 5}) == 2 * 64
    assert unit_bytes("fp32", 0, trainable=10, frozen={"int8": 64, "bf16": 5}) == 4 * (64 + 5)


def llama(layers: int, hidden: int, feed_forward: int, key_value: int, vocabulary: int, rank: int) -> "Llama":
    matrices = [
        *2 * [(hidden, hidden)],
        *2 * [(key_value, hidden)],
        *2 * [(feed_forward, hidden)],
        (hidden, feed_forward),
    ]
    return Llama(
        block=sum(rows * columns for rows, columns in matrices),
        adapters=layers * sum(rank * (rows + columns) for rows, columns in matrices),
        linear=layers * sum(rows * columns for rows, columns in matrices),
        rest=2 * vocabulary * hidden + (2 * layers + 1) * hidden,
        table=vocabulary * hidden,
    )


@dataclass(frozen=True)
class Llama:
    """Elements."""

    block: int
    adapters: int
    linear: int
    rest: int
    """Two tables and the norms."""
    table: int


def test_70_billion_in_4_bits_with_adapters_fit_4_cards_of_24_gigabytes() -> None:
    model = llama(layers=80, hidden=8192, feed_forward=28672, key_value=1024, vocabulary=128256, rank=16)
    assert model.linear + model.rest == pytest.approx(70.6e9, rel=0.001)
    states = sum(
        model_state_bytes(model.adapters, 4, 3, "bf16", {"nf4": model.linear, "bf16": model.rest}).values()
    )
    # 0.5625 of a byte for 68.5 B and 2 for 2.1 B, over 4; 16 for 0.2 B, over 4.
    assert states / GB == pytest.approx((0.5625 * 68.45 + 2 * 2.1 + 16 * 0.207) / 4, rel=0.01)
    # Backward has two blocks for a moment, and beside them a packed one on its way and a table.
    passing = 2 * unit_bytes("bf16", 3, 0, {"nf4": model.block}) + round(STORED_BYTES["nf4"] * model.block)
    table = unit_bytes("bf16", 3, 0, {"bf16": model.table})
    assert states / GB < 12
    assert (states + passing + table) / GB < 18
    # In bf16 the base alone would not fit.
    whole = model_state_bytes(model.adapters, 4, 3, "bf16", {"bf16": model.linear + model.rest})
    assert sum(whole.values()) / GB > 36
