"""What is said of measured fine-tunings."""

from pathlib import Path

from bench.finetuning.report import Results, Row, render, verdicts, write
from bench.finetuning.task import Case, Engine, Measured
from bench.machine import Machine

CHAT = Case("full", lora=False, batch_size=8, max_length=192, steps=4, learning_rate=1e-4)
LONG = Case("long", lora=False, batch_size=2, max_length=4096, steps=3, learning_rate=1e-4, long_texts=True)


def measured(tokens_per_second: float, megabytes: int, loss: float | None) -> Measured:
    seconds = [1000 / tokens_per_second]
    return Measured(seconds, [1000], (megabytes + 500) * 10**6, 500 * 10**6, [2.0], loss)


def row(engine: Engine, *runs: Measured, checkpointing: bool = False, failure: str | None = None) -> Row:
    return Row(engine, checkpointing, list(runs), failure)


def results(case: Case, *rows: Row) -> Results:
    return Results(
        case, Machine("P", 2, 24, {"Python": "3"}), f"python -m bench.finetune {case.name}", list(rows)
    )


def test_speed_counts_at_an_equal_loss_alone() -> None:
    ours = row("shardyard", measured(150, 900, 2.0), measured(300, 900, 2.0), measured(160, 900, 2.0))
    for loss, speed, met in ((2.001, 100, True), (2.1, 100, False), (2.001, 110, False)):
        (verdict,) = verdicts(results(CHAT, ours, row("trl-ddp", measured(speed, 900, loss))))
        assert verdict.met is met
        assert round(verdict.measured, 3) == round(160 / speed, 3)


def test_with_long_texts_memory_counts_against_the_same_setting() -> None:
    ours = row("shardyard", measured(10, 400, None))
    recomputing = row("shardyard", measured(8, 300, None), checkpointing=True)
    theirs = row("trl-ddp", measured(9, 1000, None), checkpointing=True)
    (verdict,) = verdicts(results(LONG, ours, recomputing, theirs))
    assert (verdict.measured, verdict.met) == (0.3, True)


def test_a_peer_that_failed_is_named_and_not_judged() -> None:
    case = results(CHAT, row("shardyard", measured(10, 400, 2.0)), row("trl-fsdp2", failure="a\nOSError: no"))
    assert verdicts(case) == []
    page = render([case])
    assert "| trl-fsdp2 | failed |" in page
    assert "OSError: no" in page


def test_a_case_replaces_its_own_figures_and_keeps_the_others(tmp_path: Path) -> None:
    for speed in (100, 200):
        write(results(CHAT, row("shardyard", measured(speed, 900, 2.0))), tmp_path)
        write(results(LONG, row("shardyard", measured(10, 400, None))), tmp_path)
    page = (tmp_path / "finetune.md").read_text()
    assert page.count("| shardyard |") == 2
    assert "| shardyard | 200.0 |" in page
