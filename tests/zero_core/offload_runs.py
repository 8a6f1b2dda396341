"""What ranks run with the same plan on several tiers."""

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from tests.zero_core import engine_runs, frozen_runs
from tests.zero_core.engine_runs import Result
from tests.zero_core.reference import OPTIMIZER, build_model
from zero_core import ZeroConfig, ZeroEngine
from zero_core.checkpoints import checkpoint
from zero_core.config.offload import OffloadConfig
from zero_core.errors import EngineError
from zero_core.memory import disk, tiers
from zero_core.sharding import homes, optimizer


@contextmanager
def small() -> Iterator[None]:
    """So that parameters of the tests' size come in several runs, and runs in several blocks."""
    with (
        patch.object(optimizer, "UPDATED_AT_ONCE", 1024),
        patch.object(optimizer, "CONVERTED_AT_ONCE", 2048),
        patch.object(disk, "BLOCK", 4096),
    ):
        yield


@contextmanager
def host_apart() -> Iterator[None]:
    """The host's memory counts as apart from the device's, as on a GPU, and everything is really copied."""
    with patch.object(homes, "host_is_device", lambda device: False):
        yield


def train(config: ZeroConfig, places: list[OffloadConfig], steps: int) -> list[Result]:
    """The same run on each."""
    with small(), host_apart():
        return [engine_runs.train(replace(config, offload=each), True, steps) for each in places]


def save_and_resume(
    config: ZeroConfig, written: OffloadConfig, read: OffloadConfig, path: Path
) -> tuple[Result, Any]:
    with small(), host_apart():
        engine_runs.save_after(replace(config, offload=written), True, 3, path, {})
        return engine_runs.resume(replace(config, offload=read), True, path, 6)


def train_adapters(config: ZeroConfig, places: list[OffloadConfig], steps: int) -> list[frozen_runs.Run]:
    with small(), host_apart():
        return [frozen_runs.train(replace(config, offload=each), steps) for each in places]


def damage_after_saving(config: ZeroConfig, path: Path) -> str:
    """Code of the error of a step whose scratch file has been overwritten, on each rank."""
    with small():
        engine = ZeroEngine(build_model(True), config, OPTIMIZER)
        engine_runs.run_steps(engine, 0, 2, Result())
        checkpoint.save(engine, path, {})
        for link in Path("/proc/self/fd").iterdir():
            name = os.readlink(link) if link.is_symlink() else ""
            if dist.get_rank() == 0 and name.startswith(str(config.scratch_directory)):
                os.pwrite(int(link.name), mmap.mmap(-1, 1 << 20), 0)
        try:
            engine_runs.run_steps(engine, 2, 3, Result())
        except EngineError as error:
            return error.code
    return "none"


@dataclass
class Held:
    optimizer: int
    """Most bytes in memory."""
    parameters: int
    on_disk: dict[str, int]


def held(config: ZeroConfig, layers: int) -> Held:
    with patch.object(tiers, "WRITTEN_BEHIND", 0), small():
        engine = ZeroEngine(build_model(True, layers), config, OPTIMIZER)
        engine_runs.run_steps(engine, 0, 2, Result())
        engine.start_measuring()
        engine_runs.run_steps(engine, 2, 3, Result())
        usage = engine.memory()
        engine.close()
    return Held(
        optimizer=usage["optimizer"]["peak"]["device"],
        parameters=usage["parameters"]["peak"]["device"],
        on_disk={name: usage[name]["current"]["disk"] for name in ("optimizer", "parameters")},
    )
