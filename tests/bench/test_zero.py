"""The whole harness on a tiny model: real ranks, one repetition."""

import json
from pathlib import Path

import pytest
import torch

from bench.engines import ADAMW
from bench.models import SHAPES, build_model
from bench.results import Comparison, Results
from bench.summary import measurements_of, trained
from bench.zero import main

TINY = ["--models", "tiny", "--precision", "fp32", "--repetitions", "1"]
TINY += ["--steps", "4", "--seq", "16", "--batch", "1"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("benchmarks")
    main([*TINY, "--ranks", "2", "--engines", "ddp", "shardyard-3", "least-work", "--output", str(output)])
    return output


@pytest.fixture(scope="module")
def comparison(directory: Path) -> Comparison:
    (found,) = Results.read(directory / "zero.json").comparisons
    return found


def reference_losses(steps: int, rows: int) -> list[float]:
    """The same training in one process, on the tokens of all ranks at once."""
    model = build_model(SHAPES["tiny"], 16)
    tokens = torch.stack(
        [
            torch.randint(0, SHAPES["tiny"].vocabulary, (16,), generator=torch.Generator().manual_seed(rank))
            for rank in range(rows)
        ]
    )
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_engines_train_as_one_process_on_all_tokens_would(comparison: Comparison) -> None:
    measured = trained(comparison)
    expected = reference_losses(steps=4, rows=2)
    assert set(measured) == {"ddp", "shardyard-3"}
    for (measurement,) in measured.values():
        assert measurement.losses == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < 0.99 * expected[0]


def test_the_least_work_trains_nothing(comparison: Comparison) -> None:
    (measurement,) = measurements_of(comparison)["least-work"]
    assert measurement.losses == pytest.approx([reference_losses(steps=1, rows=2)[0]] * 4, rel=1e-4)


def test_a_run_reports_the_steps_after_warm_up_memory_and_traffic(comparison: Comparison) -> None:
    measured = measurements_of(comparison)
    for (measurement,) in measured.values():
        assert len(measurement.step_seconds) == 2
        assert min(measurement.step_seconds) > 0
    for (measurement,) in trained(comparison).values():
        assert measurement.peak_growth > 8 * SHAPES["tiny"].elements
    (ours,), (ddp,) = measured["shardyard-3"], measured["ddp"]
    assert ours.elements_sent == pytest.approx(3 * SHAPES["tiny"].elements, rel=0.01)
    assert ddp.elements_sent is None


def test_the_report_names_the_command_and_no_place_on_this_machine(directory: Path) -> None:
    text = (directory / "zero.md").read_text()
    assert (
        "python -m bench.zero --models tiny --precision fp32 --ranks 2 --engines ddp shardyard-3 least-work "
        "--repetitions 1 --steps 4 --seq 16 --batch 1\n"
    ) in text
    assert "Losses of all 2 engines differ by at most" in text
    assert "they agree" in text
    assert str(directory) not in text


def test_the_overhead_joins_what_the_directory_holds(
    directory: Path, comparison: Comparison, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*TINY, "--overhead", "--json", "--output", str(directory)])
    printed = json.loads(capsys.readouterr().out)
    assert printed["comparisons"] == []
    results = Results.read(directory / "zero.json")
    assert results.comparisons == [comparison]
    (overheads,) = results.overheads
    measured = measurements_of(overheads)
    assert set(measured) == {"plain", "shardyard-3"}
    for (measurement,) in measured.values():
        assert measurement.losses == pytest.approx(reference_losses(steps=4, rows=1), rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--steps", "2"], "steps: 2 leaves none to measure"),
        (["--ranks", "0"], "ranks: 0 must be at least 1"),
        (["--repetitions", "0"], "argument --repetitions: invalid"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_runs(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*arguments, "--output", str(tmp_path)])
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
