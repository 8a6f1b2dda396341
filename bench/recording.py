"""One step at stage 3 and the peaks of every stage, recorded on two ranks of this machine over gloo."""

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

if TYPE_CHECKING:
    from torch import Tensor

    from zero_core import ZeroConfig, ZeroEngine
    from zero_core.sharding.flat_gradient import FlatGradient
    from zero_core.sharding.unit import Unit

MEASURED = "zero-measured.json"

SHAPE = Shape(hidden=128, layers=4, feed_forward=352, vocabulary=1024, heads=4)
RANKS = 2
ROWS = 4
SEQUENCE_LENGTH = 64

WARM_UP_STEPS = 3
"""A forward that is watched, one that is recorded, and the first that follows its program."""

RECORDED_STEPS = 8
"""The fastest is drawn: on a machine that others use it is the least disturbed one."""

Activity = Literal["gather", "present", "forward", "backward", "reduce", "pass"]

RUNS: tuple[Activity, ...] = ("forward", "backward")
"""What a unit is in the middle of, as opposed to what its memory is."""

CATEGORIES = ("parameters", "gradients", "optimizer", "communication")


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
        for run in RUNS:
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
