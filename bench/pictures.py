"""``python -m bench.pictures``: the pictures of ``docs/zero.md``, and what was measured for them.

Two ranks of this machine train a small Llama over gloo. ``zero-memory.svg`` has the closed formula beside
the peaks that the engine counted, ``zero-timeline.svg`` one step at stage 3. What was measured is kept in
``zero-measured.json``; with ``--kept`` the pictures are drawn from it again.
"""

import argparse
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from bench.recording import MEASURED, RANKS, SHAPE, Activity, Measured, measure
from zero_core.config.zero import STAGES
from zero_core.planner.formulas import model_state_bytes

DIRECTORY = Path(__file__).parents[1] / "docs" / "images"

PAPER_PARAMETERS = 7_500_000_000
PAPER_RANKS = 64

STATES: dict[Activity, tuple[str, str]] = {
    "gather": ("#9ecbff", "gathering"),
    "present": ("#dbe9f9", "present"),
    "reduce": ("#8fd19e", "gradient is reduced"),
}
"""Colour and words, drawn as wide bars."""

COMPUTE: dict[Activity, tuple[str, str]] = {
    "forward": ("#1f6feb", "forward runs"),
    "backward": ("#d9730d", "backward runs"),
}
"""Drawn as narrow bars on top."""

CATEGORIES = {
    "parameters": "#1f6feb",
    "gradients": "#d9730d",
    "optimizer": "#2da44e",
    "communication": "#8c959f",
}

STAGE_COLORS = ("#8c959f", "#2da44e", "#d9730d", "#1f6feb")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.pictures", description="Draw docs/images.")
    parser.add_argument("--kept", action="store_true", help="draw what was measured before")
    parser.add_argument("--output", type=Path, default=DIRECTORY, help="directory of the pictures")
    options = parser.parse_args(arguments)
    kept = options.output / MEASURED
    if options.kept:
        measured = TypeAdapter(Measured).validate_json(kept.read_bytes())
    else:
        measured = measure()
        options.output.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(TypeAdapter(Measured).dump_json(measured, indent=1) + b"\n")
    draw(measured, options.output)


# Drawing.


def draw(measured: Measured, directory: Path) -> None:
    """Write both SVGs, which depend on ``measured`` alone."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": "shardyard", "font.size": 9}):
        for name, size, columns, fill in (
            ("zero-memory.svg", (10, 3.6), 2, _draw_memory),
            ("zero-timeline.svg", (10, 3.8), 1, _draw_timeline),
        ):
            figure, grid = pyplot.subplots(1, columns, figsize=size, squeeze=False, layout="constrained")
            fill(grid[0], measured)
            figure.savefig(directory / name, metadata={"Date": None})
            pyplot.close(figure)


def paper_gigabytes(stage: int, ranks: int) -> float:
    """Of 7.5 B parameters, in 10^9 bytes: figure 1 of Rajbhandari et al. 2020."""
    return sum(model_state_bytes(PAPER_PARAMETERS, ranks, stage, "bf16").values()) / 1e9


def _draw_memory(axes: Any, measured: Measured) -> None:
    formula, counted = axes
    ranks = [2**power for power in range(11)]
    for stage, color in zip(STAGES, STAGE_COLORS, strict=True):
        formula.plot(ranks, [paper_gigabytes(stage, n) for n in ranks], color=color, label=f"stage {stage}")
        there = paper_gigabytes(stage, PAPER_RANKS)
        formula.plot([PAPER_RANKS], [there], "o", color=color, markersize=4)
        formula.annotate(f"{there:.1f}", (PAPER_RANKS, there), (5, 4), textcoords="offset points")
    formula.set_xscale("log", base=2)
    formula.set_yscale("log")
    formula.set_ylim(top=250)
    for axis, ticks in ((formula.xaxis, [1, 4, 16, 64, 256, 1024]), (formula.yaxis, [0.1, 1, 10, 100])):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    formula.set_xlabel("ranks of a shard group")
    formula.set_ylabel("GB a rank")
    formula.set_title("7.5 B parameters, mixed precision: formula")
    formula.grid(alpha=0.3)
    formula.legend(loc="lower left")
    _draw_peaks(counted, measured)


def _draw_peaks(axes: Any, measured: Measured) -> None:
    bottom = [0.0] * len(STAGES)
    for category, color in CATEGORIES.items():
        heights = [measured.peaks[stage][category] / 1e6 for stage in STAGES]
        axes.bar(STAGES, heights, width=0.6, bottom=bottom, color=color, label=category)
        bottom = [below + height for below, height in zip(bottom, heights, strict=True)]
    states = [sum(model_state_bytes(SHAPE.elements, RANKS, s, "bf16").values()) / 1e6 for s in STAGES]
    axes.hlines(states, [s - 0.4 for s in STAGES], [s + 0.4 for s in STAGES], colors="black", label="formula")
    axes.set_xticks(STAGES, [f"stage {stage}" for stage in STAGES])
    axes.set_ylabel("MB a rank")
    axes.set_title(f"{SHAPE.elements / 1e6:.2f} M parameters, bf16, {RANKS} ranks: peaks counted")
    axes.legend(loc="upper right")


def _draw_timeline(axes: Any, measured: Measured) -> None:
    (chart,) = axes
    rows = {name: row for row, name in enumerate(["", *(name for name in measured.units if name)], start=1)}
    for styles, height in ((STATES, 0.8), (COMPUTE, 0.32)):
        for activity, (color, words) in styles.items():
            spans = [span for span in measured.step if span.activity == activity]
            if activity in COMPUTE:
                # The root's module is the whole model: it runs as long as the pass.
                spans = [span for span in spans if span.where]
            chart.barh(
                [rows[span.where] for span in spans],
                [span.end - span.start for span in spans],
                left=[span.start for span in spans],
                height=height,
                color=color,
                edgecolor="white",
                linewidth=0.4,
                label=words,
            )
    for span in measured.step:
        if span.activity == "pass":
            chart.barh(
                [0],
                [span.end - span.start],
                left=[span.start],
                height=0.7,
                color="#6e7781",
                edgecolor="white",
            )
            middle = (span.start + span.end) / 2
            chart.text(middle, 0, span.where, color="white", ha="center", va="center", fontsize=7)
    chart.set_yticks([0, *rows.values()], ["engine", *(name or "root (last norm)" for name in rows)])
    chart.invert_yaxis()
    chart.set_xlim(0, max(span.end for span in measured.step))
    chart.set_xlabel("milliseconds")
    chart.set_title(f"One step at stage 3 on rank 0 of {RANKS}: the state of each unit")
    chart.grid(axis="x", alpha=0.3)
    chart.set_axisbelow(True)
    chart.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=5, frameon=False)


if __name__ == "__main__":
    main()
