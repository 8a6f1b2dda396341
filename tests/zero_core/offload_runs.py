"""What ranks run with the same plan on several tiers."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.zero_core import engine_runs, frozen_runs
from tests.zero_core.engine_runs import Result
from zero_core import ZeroConfig
from zero_core.config.offload import OffloadConfig
from zero_core.memory import disk
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


def train(config: ZeroConfig, tiers: list[OffloadConfig], steps: int) -> list[Result]:
    """The same run on each."""
    with small(), host_apart():
        return [engine_runs.train(replace(config, offload=each), True, steps) for each in tiers]


def save_and_resume(
    config: ZeroConfig, written: OffloadConfig, read: OffloadConfig, path: Path
) -> tuple[Result, Any]:
    with small(), host_apart():
        engine_runs.save_after(replace(config, offload=written), True, 3, path, {})
        return engine_runs.resume(replace(config, offload=read), True, path, 6)


def train_adapters(config: ZeroConfig, tiers: list[OffloadConfig], steps: int) -> list[frozen_runs.Run]:
    with small(), host_apart():
        return [frozen_runs.train(replace(config, offload=each), steps) for each in tiers]
