"""One short recording on real ranks, and what the pictures draw of it."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from bench.pictures import DIRECTORY, main, paper_gigabytes
from bench.recording import MEASURED, RANKS, SHAPE, Activity, Measured, Span

PAGE = DIRECTORY.parent / "zero.md"
PICTURES = ("zero-memory.svg", "zero-timeline.svg")
BLOCKS = [f"model.layers.{index}" for index in range(SHAPE.layers)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("images") / "new"
    main(["--output", str(output)])
    return output


@pytest.fixture(scope="module")
def measured(directory: Path) -> Measured:
    return TypeAdapter(Measured).validate_json((directory / MEASURED).read_bytes())


def spans(measured: Measured, activity: Activity, where: str) -> list[Span]:
    return sorted(
        (span for span in measured.step if (span.activity, span.where) == (activity, where)),
        key=lambda span: span.start,
    )


def test_a_unit_runs_while_it_is_present_and_its_last_reduction_starts_when_it_is_not(
    measured: Measured,
) -> None:
    for block in BLOCKS:
        gathers, present = spans(measured, "gather", block), spans(measured, "present", block)
        (forward,), (backward,) = spans(measured, "forward", block), spans(measured, "backward", block)
        reductions = spans(measured, "reduce", block)
        assert len(gathers) == len(present) == 2
        for gather, there, run in zip(gathers, present, (forward, backward), strict=True):
            assert gather.start < gather.end <= there.start <= run.start < run.end <= there.end
        assert reductions[0].start > backward.start
        assert reductions[-1].start >= present[1].end


def test_blocks_are_gathered_ahead_and_backward_takes_them_in_reverse(measured: Measured) -> None:
    forward = [spans(measured, "forward", block)[0] for block in BLOCKS]
    backward = [spans(measured, "backward", block)[0] for block in BLOCKS]
    assert sorted(forward, key=lambda span: span.start) == forward
    assert sorted(backward, key=lambda span: span.start) == backward[::-1]
    for before, block in pairwise(BLOCKS):
        assert spans(measured, "gather", block)[0].start <= spans(measured, "forward", before)[0].start


def test_the_passes_of_a_step_follow_each_other(measured: Measured) -> None:
    passes = [spans(measured, "pass", name)[0] for name in ("forward", "backward", "step")]
    assert [span.where for span in sorted(passes, key=lambda span: span.end)] == [
        "forward", "backward", "step",
    ]  # fmt: skip
    assert max(span.end for span in measured.step) == passes[-1].end


@pytest.mark.parametrize(
    ("stage", "bytes_each"),
    [
        # Parameters and gradients of 2 bytes, 12 bytes of optimizer state; a half of what is sharded.
        (0, (2, 2, 12)),
        (1, (2, 2, 6)),
        (2, (2, 1, 6)),
        (3, (1, 1, 6)),
    ],
)
def test_peaks_are_the_papers_and_at_most_a_unit_or_two_more(
    measured: Measured, stage: int, bytes_each: tuple[int, int, int]
) -> None:
    assert RANKS == 2
    two_units = 2 * 2 * SHAPE.block_elements
    for category, each in zip(("parameters", "gradients", "optimizer"), bytes_each, strict=True):
        expected = each * SHAPE.elements
        peak = measured.peaks[stage][category]
        assert 0.999 * expected < peak < 1.001 * expected + (0 if category == "optimizer" else two_units)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_marked_figures_are_the_papers(stage: int, gigabytes: float) -> None:
    assert paper_gigabytes(stage, 64) == pytest.approx(gigabytes, abs=0.05)


def test_what_was_kept_is_drawn_again_to_the_byte(directory: Path) -> None:
    drawn = {name: (directory / name).read_bytes() for name in PICTURES}
    kept = (directory / MEASURED).read_bytes()
    for name in PICTURES:
        (directory / name).unlink()
    main(["--kept", "--output", str(directory)])
    assert {name: (directory / name).read_bytes() for name in PICTURES} == drawn
    assert (directory / MEASURED).read_bytes() == kept


@pytest.mark.parametrize("name", PICTURES)
def test_the_page_shows_the_pictures_of_what_was_kept(name: str, tmp_path: Path) -> None:
    (tmp_path / MEASURED).write_bytes((DIRECTORY / MEASURED).read_bytes())
    main(["--kept", "--output", str(tmp_path)])
    words, numbers = _words_and_numbers(tmp_path / name)
    kept_words, kept_numbers = _words_and_numbers(DIRECTORY / name)
    assert words == kept_words
    # Processors round the last digit differently.
    assert numbers == pytest.approx(kept_numbers, abs=1e-4)
    assert f"](images/{name})" in PAGE.read_text()


def _words_and_numbers(picture: Path) -> tuple[list[str], list[float]]:
    parts = re.split(r"(-?\d+\.\d+)", picture.read_text())
    return parts[::2], [float(number) for number in parts[1::2]]
