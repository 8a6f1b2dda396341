import pytest

from bench.models import SHAPES
from bench.results import Run
from bench.summary import loss_spread, overhead, speed_ratio, summarize
from tests.bench.line_up import comparison, measured

PARAMETERS = SHAPES["base"].elements


def test_a_step_is_the_median_of_the_runs_medians_and_the_spread_their_extremes() -> None:
    (summary,) = summarize(
        comparison(
            measured("ddp", 100, 900, 110, repetition=1),
            measured("ddp", 300, 1, 310, repetition=2),
            measured("ddp", 200, 205, 5000, repetition=3),
        )
    ).values()
    assert summary.seconds == pytest.approx(0.205)
    assert (summary.fastest, summary.slowest) == pytest.approx((0.110, 0.300))


def test_memory_is_the_highest_of_all_runs_a_parameter() -> None:
    runs = [measured("ddp", 1, growth=g * PARAMETERS) for g in (15, 17, 16)]
    assert summarize(comparison(*runs))["ddp"].growth_per_parameter == 17


def test_elements_sent_are_given_a_parameter_where_they_are_counted() -> None:
    found = summarize(comparison(measured("ddp", 1), measured("shardyard-3", 1, sent=3 * PARAMETERS)))
    assert found["ddp"].sent_per_parameter is None
    assert found["shardyard-3"].sent_per_parameter == 3


def test_an_engine_is_faster_than_a_peer_by_the_ratio_of_their_steps() -> None:
    found = summarize(
        comparison(
            measured("shardyard-3", 100),
            measured("fsdp2", 250),
            Run("deepspeed-3", 1, failure="rank 0: OSError: no"),
        )
    )
    assert speed_ratio(found, "shardyard-3", "fsdp2") == pytest.approx(2.5)
    assert speed_ratio(found, "shardyard-3", "deepspeed-3") is None


def test_losses_are_compared_step_by_step_over_all_runs() -> None:
    runs = [measured("ddp", 1, losses=(4.0, 2.0)), measured("fsdp2", 1, losses=(4.0, 2.01))]
    assert loss_spread(comparison(*runs)) == pytest.approx(0.005)
    assert loss_spread(comparison(runs[0])) is None


def test_losses_of_what_trains_nothing_are_not_compared() -> None:
    runs = [measured("ddp", 1, losses=(4.0, 2.0)), measured("fsdp2", 1, losses=(4.0, 2.0))]
    assert loss_spread(comparison(*runs, measured("least-work", 1, losses=(4.0, 4.0)))) == 0


def test_overhead_compares_runs_of_one_repetition() -> None:
    """In the second the machine was half as fast, which is no overhead."""
    found = overhead(
        comparison(
            measured("plain", 100, repetition=1),
            measured("shardyard-3", 102, repetition=1),
            measured("plain", 200, repetition=2),
            measured("shardyard-3", 208, repetition=2),
            measured("plain", 100, repetition=3),
            measured("shardyard-3", 101, repetition=3),
        ),
        "shardyard-3",
        "plain",
    )
    assert found is not None
    assert (found.typical, found.lowest, found.highest) == pytest.approx((0.02, 0.01, 0.04))
