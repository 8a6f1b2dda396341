"""One rank of a host prepares what its others read; meanwhile all of them show that they are alive."""

import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny_model import byte_tokenizer, write_chat_file
from zero_core import TrainConfig
from zero_core.data.formats import InvalidFile
from zero_core.errors import PeerFailed
from zero_core.models.model_files import InvalidModel
from zero_core.training import preparing
from zero_core.training.journal import Journal
from zero_core.training.preparing import Datasets, Place, Preparation, Pulse
from zero_core.training.run import Run, StopRequest
from zero_core.training.stopping import Stopped

TWO = (Place(0, 2, 0, 2), Place(1, 2, 1, 2))


class CountingJournal(Journal):
    """Counts its beats and may do something at one of them."""

    def __init__(
        self, directory: Path, rank: int, at_beat: dict[int, Callable[[], Any]] | None = None
    ) -> None:
        self.beats = 0
        self._at_beat = at_beat or {}
        super().__init__(directory, rank)

    def beat(self) -> None:
        super().beat()
        self.beats += 1
        self._at_beat.get(self.beats, lambda: None)()


@pytest.fixture(autouse=True)
def sigterm() -> Iterator[None]:
    previous = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, previous)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beats are counted, so they may come without a pause."""
    monkeypatch.setattr(preparing, "_BEAT_SECONDS", 0.0)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    byte_tokenizer().save_pretrained(tmp_path / "model")
    write_chat_file(tmp_path / "train.jsonl", 12)
    write_chat_file(tmp_path / "valid.jsonl", 3, seed=1)
    given = {
        "job_id": "ftjob-test",
        "epoch": 1,
        "model_path": str(tmp_path / "model"),
        "training_file": str(tmp_path / "train.jsonl"),
        "validation_file": str(tmp_path / "valid.jsonl"),
        "train": asdict(TrainConfig()),
        "min_examples": 10,
        "resume": [],
        "export_dir": str(tmp_path / "export"),
        "hang_seconds": 60,
    }
    (tmp_path / "a1").mkdir()
    (tmp_path / "a1" / "run.json").write_text(json.dumps(given))
    return Run.read(tmp_path / "a1")


def prepared(run: Run, place: Place, max_length: int = 500, journal: Journal | None = None) -> Datasets:
    journal = journal or Journal(run.directory, place.rank)
    return Preparation(run, max_length, journal, StopRequest(run.directory), place).datasets()


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run.directory / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def test_all_ranks_read_what_one_has_prepared(run: Run) -> None:
    first, second = (prepared(run, place, max_length=90) for place in TWO)
    assert first.validation is not None
    assert second.validation is not None
    assert (len(first.training), len(first.validation)) == (12, 3)
    for ours, theirs in ((first.training, second.training), (first.validation, second.validation)):
        np.testing.assert_array_equal(ours.input_ids, theirs.input_ids)
        assert isinstance(theirs.input_ids.base, np.memmap)
    assert len(list(run.cache_dir.iterdir())) == 2
    warnings = [event["message"] for event in events(run, "message")]
    assert warnings == [*first.training.warnings, *first.validation.warnings]
    assert warnings[0] == "1 of 12 examples of training_file was cut at max_length 90 (line 1)"


def test_who_waits_goes_on_beating(run: Run) -> None:
    journal = CountingJournal(run.directory, 1, {100: lambda: prepared(run, TWO[0])})
    assert len(prepared(run, TWO[1], journal=journal).training) == 12
    assert journal.beats >= 100


def test_who_prepares_beats_at_every_example_and_tells_how_far_it_is(run: Run) -> None:
    journal = CountingJournal(run.directory, 0)
    prepared(run, TWO[0], journal=journal)
    assert journal.beats > 12 + 3
    assert [event["phase"] for event in events(run, "phase")] == ["preparing"]
    told = [(event["param"], event["done"], event["total"]) for event in events(run, "preparing")]
    assert told[0] == ("training_file", 0, None)
    assert {("training_file", 12, 12), ("validation_file", 3, 3)} <= set(told)


def test_beats_and_events_have_a_pace(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "_BEAT_SECONDS", 0.25)
    journal, checks, now = CountingJournal(run.directory, 0), [], [0.0]
    pulse = Pulse(journal, "training_file", lambda: checks.append(now[0]), lambda: now[0])
    for done in range(32):
        now[0] = done / 8
        pulse(done, 33)
    pulse(33, 33)
    assert checks == [n / 4 for n in range(16)]
    assert journal.beats == 1 + 16
    assert [event["done"] for event in events(run, "preparing")] == [0, 8, 16, 24, 33]


@pytest.mark.parametrize("first_to_fail", [0, 1])
def test_every_rank_has_the_error_of_the_one_that_prepares(run: Run, first_to_fail: int) -> None:
    """On two hosts of two ranks, whichever host's fails: all wait for both."""
    places = [Place(rank, 4, rank % 2, 2) for rank in range(4)]
    bad = run.directory.parent / "bad.jsonl"
    bad.write_text('{"text": "a"}\n{"txt": 1}\n{"text": 2}\n')
    broken = replace(run, validation_file=bad)
    runs = [broken if place.preparer == 2 * first_to_fail else run for place in places]
    caught = []
    other = CountingJournal(
        run.directory, 0, {5: lambda: caught.append(failure(runs[2], places[2], Journal(run.directory, 2)))}
    )
    if first_to_fail == 0:
        # The second host is through before: it writes its verdict, and waits.
        at_second = {9: lambda: caught.append(failure(runs[0], places[0], Journal(run.directory, 0)))}
        other = CountingJournal(run.directory, 2, at_second)
        caught.append(failure(runs[2], places[2], other))
    else:
        caught.append(failure(runs[0], places[0], other))
    caught += [failure(runs[rank], places[rank], Journal(run.directory, rank)) for rank in (1, 3)]
    assert len(caught) == 4
    assert {type(error) for error in caught} == {InvalidFile}
    assert len({str(error) for error in caught}) == 1
    assert "line 2" in str(caught[0])
    assert {error.code for error in caught if isinstance(error, InvalidFile)} == {"invalid_validation_file"}
    assert {error.param for error in caught if isinstance(error, InvalidFile)} == {"validation_file"}


def failure(run: Run, place: Place, journal: Journal) -> Exception:
    with pytest.raises((InvalidFile, InvalidModel, PeerFailed, OSError, Stopped)) as caught:
        prepared(run, place, journal=journal)
    return caught.value


def test_every_rank_knows_a_bad_model_and_another_ranks_end(run: Run) -> None:
    (run.model_path / "tokenizer.json").write_text("{")
    errors = [failure(run, place, Journal(run.directory, place.rank)) for place in TWO]
    assert isinstance(errors[0], InvalidModel)
    assert (type(errors[1]), str(errors[1])) == (InvalidModel, str(errors[0]))
    run.training_file.unlink()
    errors = [failure(run, place, Journal(run.directory, place.rank)) for place in TWO]
    assert isinstance(errors[0], FileNotFoundError)
    assert isinstance(errors[1], PeerFailed)
    assert "rank 0 failed first: FileNotFoundError: " in str(errors[1])


@pytest.mark.parametrize("action", ["pause", "cancel"])
def test_a_stop_reaches_all_ranks_between_examples(run: Run, action: str) -> None:
    ask = {5: lambda: (run.directory / "control.json").write_text(json.dumps({"action": action}))}
    first = failure(run, TWO[0], CountingJournal(run.directory, 0, ask))
    second = failure(run, TWO[1], Journal(run.directory, 1))
    assert isinstance(first, Stopped)
    assert isinstance(second, Stopped)
    assert first.action == second.action == action
    assert events(run, "preparing")[-1]["done"] < 12
    assert not list(run.cache_dir.glob("*"))


def test_a_share_is_held_out_where_there_is_no_validation_file(run: Run) -> None:
    train = TrainConfig(validation_split=0.25, seed=5)
    alone = replace(run, validation_file=None, train=train)
    data = [prepared(alone, place) for place in TWO]
    for datasets in data:
        assert datasets.validation is not None
        assert (len(datasets.training), len(datasets.validation)) == (9, 3)
    ids = [[sample[0].input_ids.tolist() for sample in datasets.training] for datasets in data]
    assert ids[0] == ids[1]
    with_file = prepared(replace(run, train=train), TWO[0])
    assert with_file.validation is not None
    assert (len(with_file.training), len(with_file.validation)) == (12, 3)
    write_chat_file(run.training_file, 1)
    error = failure(replace(alone, min_examples=1), TWO[0], Journal(run.directory, 0))
    assert "validation_split: examples of at least 2 lines are needed" in str(error)
    assert isinstance(error, InvalidFile)


def test_places_follow_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert (Place.of(2, 4).preparer, list(Place.of(2, 4).preparers)) == (0, [0])
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert (Place.of(3, 4).preparer, list(Place.of(3, 4).preparers)) == (2, [0, 2])
