from pathlib import Path

import pytest

from bench.report import render, write_report
from bench.results import Results, Run
from tests.bench.line_up import case, comparison, measured


def cells(text: str, first: str) -> list[str]:
    """Of the only row of a table that begins with ``first``."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_row_has_time_spread_memory_traffic_and_ratios() -> None:
    text = render(
        Results(
            [
                comparison(
                    measured("shardyard-3", 1000, growth=1_877_262_336, sent=563_178_700),
                    measured("shardyard-3", 1200, repetition=2),
                    measured("ddp", 2200),
                    measured("fsdp2", 3300),
                    measured("deepspeed-3", 4400),
                    measured("deepspeed-fused-3", 2750),
                    measured("deepspeed-1", 5500),
                )
            ]
        )
    )
    assert cells(text, "Shardyard, stage 3") == [
        "Shardyard, stage 3", "1,100", "1,000–1,200", "10.00", "—", "2.00", "—", "3.00", "4.00", "2.50",
    ]  # fmt: skip
    assert cells(text, "torch DDP")[5:] == ["—", "—", "1.50", "—", "—"]


def test_an_engine_that_failed_is_a_row_that_says_so() -> None:
    text = render(Results([comparison(measured("ddp", 1), Run("fsdp2", 2, failure="timed out after 5 s"))]))
    assert cells(text, "torch FSDP2, reshard after forward")[1] == "failed"
    assert "- torch FSDP2, reshard after forward, repetition 2: timed out after 5 s" in text


def test_a_report_of_failures_alone_can_be_written(tmp_path: Path) -> None:
    failed = [Run(name, 1, failure="exit status 1") for name in ("plain", "shardyard-3")]
    write_report(Results([comparison(failed[1])], [comparison(*failed, of=case(ranks=1))]), tmp_path)
    text = (tmp_path / "zero.md").read_text()
    assert "Losses: fewer than two runs to compare." in text
    assert cells(text, "base, fp32, 1 rank")[1] == "failed"
    assert "not measured" in text


@pytest.mark.parametrize(
    ("precision", "other", "words"),
    [
        ("fp32", 2.0019, "they agree"),
        ("fp32", 2.0021, "they do not agree"),
        ("bf16", 2.5, "engines round in different places"),
    ],
)
def test_losses_that_differ_are_said_to(precision: str, other: float, words: str) -> None:
    runs = [measured("ddp", 1, losses=(2.0,)), measured("fsdp2", 1, losses=(other,))]
    assert words in render(Results([comparison(*runs, of=case(precision=precision))]))


def test_the_overhead_has_a_table_and_a_verdict() -> None:
    runs = [measured("plain", 100), measured("shardyard-3", 104)]
    text = render(Results(overheads=[comparison(*runs, of=case(ranks=1))]))
    assert cells(text, "base, fp32, 1 rank") == [
        "base, fp32, 1 rank", "100.0", "104.0", "+4.0%", "+4.0% to +4.0%",
    ]  # fmt: skip
    assert "| +4.0% | — | **not met** |" in text


def test_files_depend_on_the_figures_alone(tmp_path: Path) -> None:
    results = Results([comparison(measured("ddp", 1, 2, 3), measured("fsdp2", 4))])
    for name in ("a", "b"):
        write_report(results, tmp_path / name)
    for file in ("zero.md", "zero.json", "zero.svg"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert "base, fp32, 2 ranks" in (tmp_path / "a" / "zero.svg").read_text()
