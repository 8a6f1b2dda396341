"""What the engine has to reach, and whether the results say that it does."""

from collections.abc import Iterator
from dataclasses import dataclass

from bench.engines import ENGINES
from bench.models import SHAPES
from bench.results import Comparison, Results
from bench.summary import Summary, overhead, speed_ratio, summarize

LOSS_TOLERANCE = 1e-3
"""Largest relative difference of the engines' fp32 losses at any step."""

SPEED: tuple[tuple[str, str, float], ...] = (
    ("shardyard-3", "fsdp2", 2.0),
    ("shardyard-3", "deepspeed-3", 3.0),
    ("shardyard-3", "deepspeed-fused-3", 3.0),
    ("shardyard-2", "ddp", 0.95),
    ("shardyard-2", "deepspeed-2", 3.0),
    ("shardyard-2", "deepspeed-fused-2", 3.0),
    ("shardyard-1", "ddp", 0.95),
    ("shardyard-1", "deepspeed-1", 3.0),
    ("shardyard-1", "deepspeed-fused-1", 3.0),
    ("shardyard-0", "ddp", 1.0),
)
"""An engine, a peer, and the least ratio of their speeds."""

LEAST_WORK = "least-work"
"""Does what no engine of stages 1 to 3 can leave out, and nothing else."""

MEMORY_MODEL = "base"
"""The others are too small for bytes a parameter to say much beside activations and the interpreter."""

STAGE_3_BYTES = {2: 10.5, 4: 7.0}
"""Most that peak memory may grow at stage 3 in fp32, in bytes a parameter, by ranks."""

FORMULA_FACTOR = 1.08
"""Stages 1 and 2 may take this many times the formula's bytes, and one unit more."""

OVERHEAD = 0.03
"""Most that a step on one rank may take beyond the plain model's."""


@dataclass(frozen=True)
class Verdict:
    target: str
    case: str
    measured: str
    met: bool | None
    """None: not measured."""
    limit: str = "—"
    """What the least work alone would measure."""


def verdicts(results: Results) -> list[Verdict]:
    found = [v for comparison in results.comparisons for v in _of_comparison(comparison)]
    found += [_overhead(comparison) for comparison in results.overheads]
    return sorted(found, key=lambda verdict: verdict.target)


def _of_comparison(comparison: Comparison) -> Iterator[Verdict]:
    summaries = summarize(comparison)
    case = comparison.case
    for engine, peer, least in SPEED:
        target = f"speed: {ENGINES[engine].title}, at least {least:g}x {ENGINES[peer].title}"
        ratio = speed_ratio(summaries, engine, peer)
        if ratio is None:
            yield Verdict(target, case.title, "not measured", None)
        else:
            bound = speed_ratio(summaries, LEAST_WORK, peer)
            limit = "—" if bound is None else f"{bound:.2f}x"
            yield Verdict(target, case.title, f"{ratio:.2f}x", ratio >= least, limit)
    if case.model == MEMORY_MODEL and case.precision == "fp32":
        for engine, most in memory_limits(case.model, case.ranks).items():
            yield _memory(summaries, engine, most, case.title)


def memory_limits(model: str, ranks: int) -> dict[str, float]:
    """Most bytes a parameter that peak memory may grow in fp32, by engine.

    With fp32 weights there is no second copy as master: the formulas are those of Rajbhandari et al.
    2020, section 5, for 4 bytes of parameter, 4 of gradient and 8 of Adam's moments.
    """
    unit = 4 * SHAPES[model].largest_unit / SHAPES[model].elements
    limits = {
        "shardyard-1": FORMULA_FACTOR * (8 + 8 / ranks) + unit,
        "shardyard-2": FORMULA_FACTOR * (4 + 12 / ranks) + unit,
    }
    if ranks in STAGE_3_BYTES:
        limits["shardyard-3"] = STAGE_3_BYTES[ranks]
    return limits


def _memory(summaries: dict[str, Summary], engine: str, most: float, case: str) -> Verdict:
    target = f"memory: {ENGINES[engine].title}, at most {most:.2f} bytes a parameter"
    if engine not in summaries:
        return Verdict(target, case, "not measured", None)
    growth = summaries[engine].growth_per_parameter
    return Verdict(target, case, f"{growth:.2f}", growth <= most)


def _overhead(comparison: Comparison) -> Verdict:
    target = f"overhead: {ENGINES['shardyard-3'].title}, one rank, at most {OVERHEAD:.0%} over plain torch"
    found = overhead(comparison, "shardyard-3", "plain")
    if found is None:
        return Verdict(target, comparison.case.title, "not measured", None)
    return Verdict(target, comparison.case.title, f"{found.typical:+.1%}", found.typical <= OVERHEAD)
