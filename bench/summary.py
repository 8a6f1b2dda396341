"""From runs to figures: medians, spreads, ratios, and whether the engines trained the same model."""

from dataclasses import dataclass
from statistics import median

from bench.engines import ENGINES
from bench.models import SHAPES
from bench.results import Comparison
from bench.task import Measurement


@dataclass(frozen=True)
class Summary:
    """One engine over all repetitions of a case."""

    engine: str
    seconds: float
    """Median over the runs of each run's median step."""

    fastest: float
    """Of the runs' medians, as is ``slowest``."""

    slowest: float
    growth_per_parameter: float
    """Bytes: the most that any rank's peak grew in any run, over the model's parameters."""

    sent_per_parameter: float | None
    """Elements sent in a step over the model's parameters."""


def summarize(comparison: Comparison) -> dict[str, Summary]:
    """A summary for each engine that was measured at least once, in the order in which they ran."""
    elements = SHAPES[comparison.case.model].elements
    return {
        engine: _summary(engine, measurements, elements)
        for engine, measurements in measurements_of(comparison).items()
    }


def measurements_of(comparison: Comparison) -> dict[str, list[Measurement]]:
    """By engine, one a successful run."""
    found: dict[str, list[Measurement]] = {}
    for run in comparison.runs:
        if run.measurement is not None:
            found.setdefault(run.engine, []).append(run.measurement)
    return found


def trained(comparison: Comparison) -> dict[str, list[Measurement]]:
    """``measurements_of`` the engines whose losses can be compared."""
    return {engine: found for engine, found in measurements_of(comparison).items() if ENGINES[engine].trains}


def _summary(engine: str, measurements: list[Measurement], elements: int) -> Summary:
    medians = [median(m.step_seconds) for m in measurements]
    sent = measurements[-1].elements_sent
    return Summary(
        engine=engine,
        seconds=median(medians),
        fastest=min(medians),
        slowest=max(medians),
        growth_per_parameter=max(m.peak_growth for m in measurements) / elements,
        sent_per_parameter=None if sent is None else sent / elements,
    )


def speed_ratio(summaries: dict[str, Summary], engine: str, peer: str) -> float | None:
    """How many steps ``engine`` makes in the time of one step of ``peer``; None unless both were measured."""
    if engine not in summaries or peer not in summaries:
        return None
    return summaries[peer].seconds / summaries[engine].seconds


def loss_spread(comparison: Comparison) -> float | None:
    """Largest relative difference between any two runs' losses at the same step; None for fewer than two."""
    losses = [measurement.losses for found in trained(comparison).values() for measurement in found]
    if len(losses) < 2:
        return None
    return max((max(step) - min(step)) / min(step) for step in zip(*losses, strict=True))


@dataclass(frozen=True)
class Overhead:
    """Extra time of a step, as a fraction of the plain model's."""

    typical: float
    """Median over the repetitions; each compares the medians of two runs that followed each other."""

    lowest: float
    highest: float


def overhead(comparison: Comparison, engine: str, plain: str) -> Overhead | None:
    """None where no repetition measured both."""
    seconds = {
        (run.engine, run.repetition): median(run.measurement.step_seconds)
        for run in comparison.runs
        if run.measurement is not None
    }
    ratios = [
        ours / seconds[plain, repetition] - 1
        for (name, repetition), ours in seconds.items()
        if name == engine and (plain, repetition) in seconds
    ]
    return Overhead(median(ratios), min(ratios), max(ratios)) if ratios else None
