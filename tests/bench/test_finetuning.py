"""What is said of measured fine-tunings."""

from bench.finetuning.report import Results, Row, render, verdicts
from bench.finetuning.task import Case, Engine, Measured
from bench.machine import Machine

CHAT = Case("full", lora=False, batch_size=8, max_length=192, steps=4, learning_rate=1e-4)
LONG = Case("long", lora=False, batch_size=2, max_length=4096, steps=3, learning_rate=1e-4, long_texts=True)


def measured(tokens_per_second: float, megabytes: int, loss: float | None) -> Measured:
    seconds = [1000 / tokens_per_second]
    return Measured(seconds, [1000], (megabytes + 500) * 10**6, 500 * 10**6, [2.0], loss)


def row(case: Case, engine: Engine, *runs: Measured, failure: str | None = None) -> Row:
    return Row(case, engine, False, list(runs), failure)


def test_speed_counts_at_an_equal_loss_alone() -> None:
    ours = row(CHAT, "shardyard", measured(150, 900, 2.0), measured(300, 900, 2.0), measured(160, 900, 2.0))
    for loss, speed, met in ((2.001, 100, True), (2.1, 100, False), (2.001, 110, False)):
        (verdict,) = verdicts([ours, row(CHAT, "trl-ddp", measured(speed, 900, loss))])
        assert verdict.met is met
        assert round(verdict.measured, 3) == round(160 / speed, 3)


def test_with_long_texts_memory_counts() -> None:
    ours = row(LONG, "shardyard", measured(10, 400, None))
    (verdict,) = verdicts([ours, row(LONG, "trl-ddp", measured(9, 1000, None))])
    assert (verdict.measured, verdict.met) == (0.4, True)


def test_a_peer_that_failed_is_named_and_not_judged() -> None:
    rows = [row(CHAT, "shardyard", measured(10, 400, 2.0)), row(CHAT, "trl-fsdp2", failure="a\nOSError: no")]
    assert verdicts(rows) == []
    page = render(Results(Machine("P", 2, 24, {"Python": "3"}), "python -m bench.finetune", rows))
    assert "| trl-fsdp2 | failed |" in page
    assert "OSError: no" in page
