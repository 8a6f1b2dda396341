"""Tokenizing on several cores: rendering a template is Python, so threads would not do.

The processes get chunks of examples in turn, one at a time each, and are asked for answers in the same
turn. So answers keep the file's order and memory is bounded by a chunk a process.
"""

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from zero_core.data.examples import Example
from zero_core.data.recipe import Prepared, Recipe
from zero_core.data.wire import encode_example, read_answer
from zero_core.models.model_files import InvalidModel

BYTES_A_PROCESS = 4 * 2**20
"""Of a file: fewer are tokenized before a process has started, which takes seconds of importing."""

MOST_PROCESSES = 16
"""Reading the file is one process's work, and keeps about so many busy."""

_CHUNK_BYTES = 64 * 2**10
_CHUNK_EXAMPLES = 64
_CGROUPS = Path("/sys/fs/cgroup")


def processes_for(size: int) -> int:
    """How many tokenize a file of ``size`` bytes; 1 is this process alone."""
    return max(1, min(usable_cores(), MOST_PROCESSES, size // BYTES_A_PROCESS))


def usable_cores() -> int:
    """Cores that this process may run on at once: its CPU set, and the quotas of its control groups (v2)."""
    cores = len(os.sched_getaffinity(0))
    groups = Path("/proc/self/cgroup").read_text().splitlines()
    for own in (line.removeprefix("0::/") for line in groups if line.startswith("0::/")):
        for directory in (_CGROUPS / own, *(_CGROUPS / own).parents):
            quota = directory / "cpu.max"
            if quota.is_file():
                cores = min(cores, cores_of_quota(quota.read_text(), cores))
    return cores


def cores_of_quota(text: str, unlimited: int) -> int:
    """Whole cores that ``cpu.max`` (microseconds in a period) allows, at least one."""
    allowed, period = text.split()
    return unlimited if allowed == "max" else max(1, int(allowed) // int(period))


class TokenizingPool:
    """Used in a ``with``; its processes end with it."""

    def __init__(self, recipe: Recipe, processes: int) -> None:
        self._channels = [_Channel() for _ in range(processes)]
        theirs = [descriptor for channel in self._channels for descriptor in channel.theirs]
        self._parent = subprocess.Popen(
            [sys.executable, "-m", "zero_core.data.tokenizing_worker"]
            + [
                f"{requests},{answers}"
                for requests, answers in (channel.theirs for channel in self._channels)
            ],
            stdin=subprocess.PIPE,
            pass_fds=theirs,
            env=_environment(),
            process_group=0,
        )
        for descriptor in theirs:
            os.close(descriptor)
        assert self._parent.stdin is not None
        with suppress(BrokenPipeError), self._parent.stdin as file:
            file.write(json.dumps([str(recipe.model_dir.absolute()), recipe.settings()]).encode())

    def __enter__(self) -> "TokenizingPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.killpg(self._parent.pid, signal.SIGKILL)
        self._parent.wait()
        for channel in self._channels:
            channel.close()

    def prepare(self, examples: Iterator[Example]) -> Iterator[Prepared]:
        """In the order of ``examples``. Raises InvalidModel, or RuntimeError if a process ends."""
        chunks = _chunks(examples)
        asked: deque[_Channel] = deque()
        for channel, chunk in zip(self._channels, chunks, strict=False):
            channel.ask(chunk)
            asked.append(channel)
        while asked:
            channel = asked.popleft()
            answer = channel.answer()
            chunk = next(chunks, b"")
            if chunk:
                channel.ask(chunk)
                asked.append(channel)
            yield from answer


def _environment() -> dict[str, str]:
    # torchrun's RANK marks the processes that a supervisor asks to stop: these are none.
    inherited = {name: value for name, value in os.environ.items() if name != "RANK"}
    # A core each, and no device.
    return inherited | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "RAYON_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


class _Channel:
    """Two pipes to one process."""

    def __init__(self) -> None:
        requests, self._requests = os.pipe()
        answers, theirs = os.pipe()
        self.theirs = (requests, theirs)
        """The process's ends."""
        self._answers = os.fdopen(answers, "rb")

    def ask(self, request: bytes) -> None:
        content = memoryview(request + b"\n")
        # One that has ended says why in its answer, or by giving none.
        with suppress(BrokenPipeError):
            while content:
                content = content[os.write(self._requests, content) :]

    def answer(self) -> list[Prepared]:
        head = self._answers.readline()
        if not head.endswith(b"\n"):
            raise RuntimeError("a tokenizing process has ended; the log has its error")
        content = json.loads(head)
        if "invalid_model" in content:
            raise InvalidModel(content["invalid_model"])
        return read_answer(content, self._answers)

    def close(self) -> None:
        os.close(self._requests)
        self._answers.close()


def _chunks(examples: Iterator[Example]) -> Iterator[bytes]:
    """JSON lists of examples, for one answer each."""
    chunk: list[bytes] = []
    size = 0
    for example in examples:
        chunk.append(encode_example(example))
        size += len(chunk[-1])
        if size >= _CHUNK_BYTES or len(chunk) == _CHUNK_EXAMPLES:
            yield b"[" + b",".join(chunk) + b"]"
            chunk, size = [], 0
    if chunk:
        yield b"[" + b",".join(chunk) + b"]"
