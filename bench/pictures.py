"""``python -m bench.pictures``: the pictures of ``docs/zero.md``, and what was measured for them.

Two ranks of this machine train a small Llama over gloo. ``zero-memory.svg`` has the closed formula beside
the peaks that the engine counted, ``zero-timeline.svg`` one step at stage 3. What was measured is kept in
``zero-measured.json``; with ``--kept`` the pictures are drawn from it again.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import wraps
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter

from bench.models import Shape
from zero_core.config.zero import STAGES
from zero_core.planner import model_state_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from zero_core import ZeroConfig, ZeroEngine
    from zero_core.sharding.flat_gradient import FlatGradient
    from zero_core.sharding.unit import Unit

DIRECTORY = Path(__file__).parents[1] / "docs" / "images"
MEASURED = "zero-measured.json"

SHAPE = Shape(hidden=128, layers=4, feed_forward=352, vocabulary=1024, heads=4)
RANKS = 2
ROWS = 4
SEQUENCE_LENGTH = 64

WARM_UP_STEPS = 3
"""A forward that is watched, one that is recorded, and the first that follows its program."""

RECORDED_STEPS = 8
"""The fastest is drawn: on a machine that others use it is the least disturbed one."""

PAPER_PARAMETERS = 7_500_000_000
PAPER_RANKS = 64

Activity = Literal["gather", "present", "forward", "backward", "reduce", "pass"]

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


@dataclass(frozen=True)
class Span:
    """Something that went on for a while on rank 0, in milliseconds since the step began."""

    activity: Activity
    where: str
    """Name of the unit; of a pass, its own."""

    start: float
    end: float


@dataclass(frozen=True)
class Measured:
    units: list[str]
    """In the engine's order."""

    step: list[Span]
    peaks: dict[int, dict[str, int]]
    """By stage: bytes of each category, the most of one rank during a step in bf16."""


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


# Measuring.


def measure() -> Measured:
    """Run the ranks. Raises torch's ProcessRaisedException with the traceback of one that fails."""
    from torch.multiprocessing.spawn import start_processes

    # What takes most of the time is imported once, not by each rank.
    set_forkserver_preload(["torch", "torch.distributed", "transformers.models.llama", "zero_core.engine"])
    with tempfile.TemporaryDirectory() as directory:
        start_processes(_rank, args=(directory,), nprocs=RANKS, start_method="forkserver")
        return TypeAdapter(Measured).validate_json((Path(directory) / MEASURED).read_bytes())


def _rank(rank: int, directory: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=RANKS)
    # Before the methods are watched, which would be counted too.
    peaks = {stage: _peaks(stage) for stage in STAGES}
    units, step = _fastest_step()
    if rank == 0:
        measured = Measured(units, step, peaks)
        (Path(directory) / MEASURED).write_bytes(TypeAdapter(Measured).dump_json(measured))
    dist.barrier()
    dist.destroy_process_group()


def _peaks(stage: int) -> dict[str, int]:
    engine = _engine(_config(stage, "bf16"))
    tokens = _tokens(rows=1)
    for _ in range(WARM_UP_STEPS):
        _train(engine, tokens)
    engine.start_measuring()
    _train(engine, tokens)
    usage = engine.memory()
    engine.close()
    return {category: usage[category]["peak"]["device"] for category in CATEGORIES}


def _fastest_step() -> tuple[list[str], list[Span]]:
    engine = _engine(_config(3, "fp32"))
    tokens = _tokens(ROWS)
    for _ in range(WARM_UP_STEPS):
        _train(engine, tokens)
    recorder = Recorder()
    recorder.watch_engine(engine)
    steps = []
    for _ in range(RECORDED_STEPS):
        engine.communicator.barrier()
        recorder.restart()
        _train(engine, tokens)
        steps.append(recorder.spans)
    return [unit.name for unit in engine.units], min(steps, key=lambda spans: max(s.end for s in spans))


def _config(stage: int, precision: Literal["fp32", "bf16"]) -> "ZeroConfig":
    """Buckets of one block, and the next unit gathered ahead, as in a large model with the defaults."""
    from zero_core import ZeroConfig

    return ZeroConfig(
        stage=stage,
        precision=precision,
        reduce_bucket_size=SHAPE.block_elements,
        allgather_bucket_size=0,
        prefetch_bucket_size=1,
    )


def _engine(config: "ZeroConfig") -> "ZeroEngine":
    from bench.models import build_model
    from zero_core import AdamWConfig, ZeroEngine

    return ZeroEngine(build_model(SHAPE, SEQUENCE_LENGTH), config, AdamWConfig(lr=1e-3))


def _tokens(rows: int) -> "Tensor":
    import torch

    return torch.randint(0, SHAPE.vocabulary, (rows, SEQUENCE_LENGTH))


def _train(engine: "ZeroEngine", tokens: "Tensor") -> None:
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()


class Recorder:
    """Times what an engine does, by wrapping methods of its classes in this process, for good."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.spans: list[Span] = []
        self._open: dict[tuple[Activity, str], float] = {}
        self._zero = time.perf_counter()

    def begin(self, activity: Activity, where: str) -> None:
        self._open.setdefault((activity, where), self._now())

    def end(self, activity: Activity, where: str) -> bool:
        """False if it had not begun."""
        start = self._open.pop((activity, where), None)
        if start is not None:
            self.spans.append(Span(activity, where, round(start, 3), round(self._now(), 3)))
        return start is not None

    def _now(self) -> float:
        return 1e3 * (time.perf_counter() - self._zero)

    def watch_engine(self, engine: "ZeroEngine") -> None:
        from zero_core import ZeroEngine
        from zero_core.sharding.flat_gradient import FlatGradient
        from zero_core.sharding.schedule import Reductions
        from zero_core.sharding.sharded_schedule import ShardedSchedule
        from zero_core.sharding.unit import Unit

        self._unit_of = {flat.gradient: unit.name for unit in engine.units for flat in unit.flats}
        for name, words in (("__call__", "forward"), ("backward", "backward"), ("step", "step")):
            _watch(ZeroEngine, name, self._pass(words))
        for owner, name, around in (
            (Unit, "start_gather", self._start_gather),
            (Unit, "wait", self._wait),
            (Unit, "release", self._release),
            (ShardedSchedule, "need", self._need),
            (FlatGradient, "reduce", self._reduce),
            (Reductions, "finish", self._finish_reductions),
        ):
            _watch(owner, name, around)

    def _pass(self, words: str) -> Callable[..., AbstractContextManager[None]]:
        @contextmanager
        def around(*_: Any) -> Iterator[None]:
            self.begin("pass", words)
            yield
            self.end("pass", words)

        return around

    @contextmanager
    def _start_gather(self, unit: "Unit") -> Iterator[None]:
        if not unit.present:
            self.begin("gather", unit.name)
        yield

    @contextmanager
    def _wait(self, unit: "Unit") -> Iterator[None]:
        yield
        if self.end("gather", unit.name):
            self.begin("present", unit.name)

    @contextmanager
    def _release(self, unit: "Unit") -> Iterator[None]:
        for run in COMPUTE:
            self.end(run, unit.name)
        yield
        self.end("present", unit.name)

    @contextmanager
    def _reduce(self, gradient: "FlatGradient") -> Iterator[None]:
        self.begin("reduce", self._unit_of[gradient])
        yield

    @contextmanager
    def _finish_reductions(self, _: Any) -> Iterator[None]:
        """One bucket is under way at most, so it is the one that ends."""
        yield
        for activity, where in list(self._open):
            if activity == "reduce":
                self.end(activity, where)

    @contextmanager
    def _need(self, schedule: Any, unit: "Unit") -> Iterator[None]:
        from zero_core.sharding.unit import Pass

        yield
        self.begin("forward" if schedule.current is Pass.FORWARD else "backward", unit.name)


def _watch(owner: type, name: str, around: Callable[..., AbstractContextManager[None]]) -> None:
    method = getattr(owner, name)

    @wraps(method)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        with around(self, *args):
            return method(self, *args, **kwargs)

    setattr(owner, name, watched)


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
