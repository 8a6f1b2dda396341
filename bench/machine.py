"""What a reader must know about the machine to compare figures; nothing that identifies it."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

PACKAGES = ("torch", "transformers", "deepspeed", "trl")


@dataclass(frozen=True)
class Machine:
    processor: str
    cores: int
    """That this process may use."""

    memory_gib: float
    versions: dict[str, str]

    @property
    def title(self) -> str:
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return f"{self.cores} cores ({self.processor}), {self.memory_gib:.0f} GiB of memory; {versions}"


def this_machine() -> Machine:
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=psutil.virtual_memory().total / 2**30,
        versions={"Python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
