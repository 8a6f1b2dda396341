import pytest

from bench.gpu import empty_report, tokens_per_second
from bench.task import Case, Measurement


def test_without_a_gpu_nothing_is_claimed() -> None:
    text = empty_report()
    assert "No GPU was at hand" in text
    assert "nothing is claimed" in text
    assert "|" not in text


def test_tokens_of_all_ranks_count() -> None:
    case = Case("7B", "bf16", ranks=4, steps=5, sequence_length=2048, rows=2)
    measurement = Measurement("fsdp2", [0.5, 9.0, 0.25], [], 0, None)
    assert tokens_per_second(case, measurement) == pytest.approx(4 * 2 * 2048 / 0.5)
