"""``docs/benchmarks/zero.md`` from results. ``python -m bench.report`` writes it anew from ``zero.json``."""

import argparse
from collections.abc import Iterable
from pathlib import Path

from bench.engines import ENGINES
from bench.markdown import table
from bench.models import SHAPES
from bench.plot import draw
from bench.results import Comparison, Results
from bench.summary import Summary, loss_spread, overhead, speed_ratio, summarize, trained
from bench.targets import LOSS_TOLERANCE, verdicts
from bench.task import WARM_UP_STEPS, Case

DIRECTORY = Path("docs/benchmarks")

HOW = f"""\
How: every run is a set of fresh processes on one machine, one thread each, over gloo on loopback. Engines
take turns within a repetition. Each trains a Llama of random weights on random tokens with AdamW, the same
model and tokens for all. A step is timed from barrier to barrier; a run's first {WARM_UP_STEPS} do not count.
"Step" is the median over the runs of each run's median, "spread" the least and the greatest of the runs'
medians. "Growth" is the highest resident memory of any rank in any run, less what it held before the model
was built, over the model's parameters. "Sent" is what the engine itself counts at its collectives on a rank,
over the parameters, before the ring factor (N - 1)/N. A ratio above 1 is that much faster than the peer.

Peers: bf16 is autocast over fp32 weights for DDP and ZeroRedundancyOptimizer, `MixedPrecisionPolicy` with
fp32 reductions for FSDP2, and `bf16.enabled` for DeepSpeed. AdamW is torch's fused one for all but
DeepSpeed, which is there twice: with the AdamW that its configuration makes (`torch_adam`, not fused), as
its users start it, and with torch's fused one handed to it.
ZeroRedundancyOptimizer runs over DDP with `gradient_as_bucket_view`. DeepSpeed shards every parameter at
stage 3 (persistence threshold 0) and clips nothing. The rest is every peer's default.

"No engine" trains nothing: it runs the model forward and backward, in bf16 with bf16 weights, and updates a
rank's part of fp32 weights with torch's fused AdamW. No engine of stages 1 to 3 can leave any of that out, so
what it reaches over a peer is about the most that any could: an engine that keeps the memory of gradients
for the next step, where torch alone gets it anew, can save some of its page faults.
"""


def write_report(results: Results, directory: Path) -> None:
    """``zero.json``, ``zero.md`` and ``zero.svg`` in ``directory``."""
    results.write(directory / "zero.json")
    if results.comparisons:
        draw(results.comparisons, directory / "zero.svg")
    (directory / "zero.md").write_text(render(results))


def render(results: Results) -> str:
    parts = ["# The ZeRO engine beside its peers", HOW.rstrip(), *_origins(results)]
    judged = verdicts(results)
    if judged:
        words = {True: "met", False: "**not met**", None: "not measured"}
        rows = [(v.target, v.case, v.measured, v.limit, words[v.met]) for v in judged]
        parts += ["## Targets", table(("target", "case", "measured", "no engine", "verdict"), rows)]
    if results.comparisons:
        parts.append("![Step time and memory by engine](zero.svg)")
    for comparison in results.comparisons:
        parts += _comparison(comparison)
    if results.overheads:
        parts += _overheads(results.overheads)
    return "\n\n".join(parts) + "\n"


def _origins(results: Results) -> list[str]:
    """Machine and commands, said once for all cases that share them."""
    commands: dict[str, list[str]] = {}
    for comparison in (*results.comparisons, *results.overheads):
        known = commands.setdefault(comparison.machine.title, [])
        if comparison.command not in known:
            known.append(comparison.command)
    return [
        part
        for machine, lines in commands.items()
        for part in (f"Machine: {machine}.", "```\n" + "\n".join(lines) + "\n```")
    ]


def _comparison(comparison: Comparison) -> list[str]:
    case = comparison.case
    summaries = summarize(comparison)
    head = ("engine", "step, ms", "spread, ms", "growth, bytes a parameter", "sent, Ψ")
    ratios = ("x DDP", "x ZeroRedundancy", "x FSDP2", "x DeepSpeed, same stage", "and fused")
    engines = dict.fromkeys(run.engine for run in comparison.runs)
    rows = [_row(engine, summaries, len(ratios)) for engine in engines]
    return [
        f"## {case.title}",
        _shape(case),
        table((*head, *ratios), rows),
        *_failures(comparison),
        _agreement(comparison),
    ]


def _row(engine: str, summaries: dict[str, Summary], ratios: int) -> list[str]:
    if engine not in summaries:
        return [ENGINES[engine].title, "failed", *["—"] * (3 + ratios)]
    found = summaries[engine]
    stage = ENGINES[engine].stage
    peers = ("ddp", "zero-redundancy", "fsdp2", f"deepspeed-{stage}", f"deepspeed-fused-{stage}")
    return [
        ENGINES[engine].title,
        f"{1e3 * found.seconds:,.0f}",
        f"{1e3 * found.fastest:,.0f}–{1e3 * found.slowest:,.0f}",
        f"{found.growth_per_parameter:.2f}",
        "—" if found.sent_per_parameter is None else f"{found.sent_per_parameter:.2f}",
        *[_ratio(speed_ratio(summaries, engine, peer)) if peer != engine else "—" for peer in peers],
    ]


def _ratio(ratio: float | None) -> str:
    return "—" if ratio is None else f"{ratio:.2f}"


def _shape(case: Case) -> str:
    shape = SHAPES[case.model]
    return (
        f"{shape.elements / 1e6:.1f} M parameters: {shape.layers} layers, hidden {shape.hidden}, vocabulary "
        f"{shape.vocabulary}. {case.rows} x {case.sequence_length} tokens a rank, {case.steps} steps a run."
    )


def _failures(comparison: Comparison) -> list[str]:
    lines = [
        f"- {ENGINES[run.engine].title}, repetition {run.repetition}: {run.failure}"
        for run in comparison.runs
        if run.failure is not None
    ]
    return ["Failed runs:\n\n" + "\n".join(lines)] if lines else []


def _agreement(comparison: Comparison) -> str:
    spread = loss_spread(comparison)
    if spread is None:
        return "Losses: fewer than two runs to compare."
    engines = len(trained(comparison))
    reach = f"Losses of all {engines} engines differ by at most {spread:.1e} (relative) at any step"
    if comparison.case.precision != "fp32":
        return f"{reach}; in {comparison.case.precision} engines round in different places."
    verdict = "they agree" if spread <= LOSS_TOLERANCE else "**they do not agree**"
    return f"{reach}: within {LOSS_TOLERANCE:g}, {verdict}."


def _overheads(comparisons: Iterable[Comparison]) -> list[str]:
    rows = []
    for comparison in comparisons:
        summaries = summarize(comparison)
        found = overhead(comparison, "shardyard-3", "plain")
        if found is None:
            rows.append([comparison.case.title, "failed", "—", "—", "—"])
            continue
        rows.append(
            [
                comparison.case.title,
                f"{1e3 * summaries['plain'].seconds:,.1f}",
                f"{1e3 * summaries['shardyard-3'].seconds:,.1f}",
                f"{found.typical:+.1%}",
                f"{found.lowest:+.1%} to {found.highest:+.1%}",
            ]
        )
    return [
        "## Overhead on one rank",
        "Stage 3 on one rank and the plain model with torch's fused AdamW, each in its own process, take "
        "turns. The overhead is the median over the repetitions of the ratio of both medians.",
        table(("case", "plain, ms", "Shardyard, ms", "overhead", "spread"), rows),
        *[text for comparison in comparisons for text in _failures(comparison)],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the report anew from zero.json, measuring nothing.")
    parser.add_argument("--output", type=Path, default=DIRECTORY, help="directory with zero.json")
    directory: Path = parser.parse_args().output
    write_report(Results.read(directory / "zero.json"), directory)


if __name__ == "__main__":
    main()
