"""DeepSpeed's rules, step by step."""

from zero_core import LossScaleConfig
from zero_core.sharding.loss_scaler import LossScaler


def scales(config: LossScaleConfig, overflows: str) -> list[float]:
    """The scale after each step; ``x`` is an overflow."""
    scaler = LossScaler(config)
    return [(scaler.update(overflow=step == "x"), scaler.scale)[1] for step in overflows]


def test_the_first_overflow_is_forgiven_and_the_next_ones_halve() -> None:
    assert scales(LossScaleConfig(initial_scale_power=4), "xxx") == [16, 8, 4]
    assert scales(LossScaleConfig(initial_scale_power=4, hysteresis=1), "xx") == [8, 4]


def test_it_doubles_after_a_window_and_the_hysteresis_is_whole_again() -> None:
    config = LossScaleConfig(initial_scale_power=4, window=2)
    assert scales(config, "x..xx") == [16, 16, 32, 32, 16]


def test_an_overflow_starts_the_window_anew() -> None:
    assert scales(LossScaleConfig(initial_scale_power=4, window=2, hysteresis=9), ".x..") == [16, 16, 16, 32]


def test_it_stops_at_the_minimum_and_a_static_one_never_moves() -> None:
    assert scales(LossScaleConfig(initial_scale_power=1, hysteresis=1, minimum=1), "xx") == [1, 1]
    assert scales(LossScaleConfig(static=128), "xx" + "." * 2000)[-1] == 128


def test_it_tells_when_it_can_fall_no_more() -> None:
    scaler = LossScaler(LossScaleConfig(initial_scale_power=1, hysteresis=1))
    assert not scaler.exhausted
    scaler.update(overflow=True)
    assert scaler.exhausted
    assert LossScaler(LossScaleConfig(static=8)).exhausted


def test_its_state_survives_a_checkpoint() -> None:
    config = LossScaleConfig(initial_scale_power=4, window=3)
    before, after = LossScaler(config), LossScaler(config)
    for overflow in (True, False, False):
        before.update(overflow)
    after.restore(before.state())
    for scaler in (before, after):
        scaler.update(False)
    assert before.state() == after.state() == {"scale": 32.0, "good_steps": 3, "overflows_left": 2}
