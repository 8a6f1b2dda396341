"""The formula against the figures that were published with it."""

import pytest

from zero_core.planner import model_state_bytes

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
