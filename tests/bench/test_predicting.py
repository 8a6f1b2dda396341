from bench.machine import Machine
from bench.predicting.case import CASES, Case
from bench.predicting.results import Results, Row, render, verdict
from bench.predicting.subjects import filled, micro_batch, subject

MACHINE = Machine("a processor", 2, 8.0, {"torch": "2"})


def test_a_table_of_cases_and_what_the_predictions_come_to() -> None:
    row = Row(Case("decoder", 3, 2), imports=400_000_000, predicted=1_040_000_000, measured=1_000_000_000)
    text = render(Results(MACHINE, "python -m bench.predict", [row], {"another": "exit status 1"}))
    assert "| decoder, stage 3, 2 ranks, 4 x 256 | 400 | 1,040 | 1,000 | +4.0% | +6.7% |" in text
    assert "another: not measured, exit status 1." in text


def test_what_was_not_reached_is_said() -> None:
    assert verdict([0.02, 0.04, -0.01]).count("**not met**") == 0
    assert "largest 12.0% (at most 10%: **not met**)" in verdict([0.0, 0.01, 0.12])
    assert "most below the measured 5.0% (at most 3%: **not met**)" in verdict([0.0, -0.05])


def test_the_cases_are_many_and_each_is_another() -> None:
    assert len({case.title for case in CASES}) == len(CASES) >= 24
    assert {case.stage for case in CASES} == {0, 1, 2, 3}


def test_a_micro_batch_has_the_shape_that_is_predicted_for() -> None:
    case = Case("decoder", 0, 1, rows=2, length=16, packed=True)
    inputs = filled(subject(case)[0].inputs(micro_batch(case)), micro_batch(case))
    assert inputs["input_ids"].shape == (1, 32)
    assert inputs["position_ids"][0].tolist() == [*range(16), *range(16)]
    assert len(inputs["targets"]) == micro_batch(case).shape.targets == 30
