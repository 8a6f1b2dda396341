"""Bars of step time and memory: one row of two charts a case."""

from collections.abc import Sequence
from pathlib import Path

from bench.results import Comparison
from bench.summary import summarize

OURS = "#1f6feb"
PEERS = "#8c959f"


def draw(comparisons: Sequence[Comparison], path: Path) -> None:
    """Write an SVG that depends on the figures alone, so that it changes only when they do."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": "shardyard", "font.size": 8}):
        figure, grid = pyplot.subplots(
            len(comparisons), 2, figsize=(10, 2.6 * len(comparisons)), squeeze=False, layout="constrained"
        )
        for (times, memory), comparison in zip(grid, comparisons, strict=True):
            found = list(summarize(comparison).values())
            names = [each.engine for each in found]
            colors = [OURS if name.startswith("shardyard") else PEERS for name in names]
            below = [1e3 * (each.seconds - each.fastest) for each in found]
            above = [1e3 * (each.slowest - each.seconds) for each in found]
            times.barh(names, [1e3 * each.seconds for each in found], color=colors, xerr=(below, above))
            times.set_title(f"{comparison.case.title}: step, ms")
            memory.barh(names, [each.growth_per_parameter for each in found], color=colors)
            memory.set_title(f"{comparison.case.title}: growth, bytes a parameter")
            for axes in (times, memory):
                axes.invert_yaxis()
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
