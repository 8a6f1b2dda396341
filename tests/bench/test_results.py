from pathlib import Path

import pytest
from pydantic import ValidationError

from bench.results import Results, Run
from tests.bench.line_up import case, comparison, measured


def test_results_come_back_as_they_were_written(tmp_path: Path) -> None:
    failed = Run("fsdp2", 1, failure="timed out after 5 s")
    results = Results([comparison(measured("ddp", 1.5, sent=7), failed)], [comparison(of=case(ranks=1))])
    path = tmp_path / "new" / "zero.json"
    results.write(path)
    assert Results.read(path) == results
    assert Results.read(tmp_path / "absent.json") == Results()


def test_a_file_of_another_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / "zero.json").write_text('{"comparisons": [{"case": "base"}]}')
    with pytest.raises(ValidationError):
        Results.read(tmp_path / "zero.json")


def test_a_case_measured_again_replaces_the_old_one_and_leaves_the_others() -> None:
    old, other = comparison(measured("ddp", 1)), comparison(of=case("wide", "bf16", 4))
    new = comparison(measured("fsdp2", 2))
    results = Results().with_comparison(other).with_comparison(old).with_comparison(new)
    assert results.comparisons == [new, other]
