"""A pool of ranks that stays alive across tests: starting a process group for each would take minutes.

``pool.run(function, *args)`` calls ``function(*args)`` on every rank, in a process that has the default
process group on gloo, and returns the answers in rank order. The function must be importable by name.
"""

import multiprocessing
import os
import tempfile
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

GRACE_SECONDS = 5.0

TIMEOUT_SECONDS = 120.0
"""Longest that one call may take before its ranks are ended and the test fails."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "transformers", "peft", "zero_core.engine"])


class RankError(AssertionError):
    """The tracebacks of the ranks that raised."""


class RankPool:
    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The answers in rank order. A rank that raises ends the pool; the next call starts a new one."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        answers: dict[int, Any] = {}
        errors: dict[int, str] = {}
        while len(answers) + len(errors) < self.world_size:
            waiting = [pipe for i, pipe in enumerate(self._pipes) if i not in answers | errors]
            # Once one has failed, the others have a moment to say why they do too; they may hang for good.
            ready = wait(waiting, timeout=GRACE_SECONDS if errors else TIMEOUT_SECONDS)
            if not ready:
                silent = sorted(set(range(self.world_size)) - (answers | errors).keys())
                errors[-1] = f"ranks {silent} gave no answer"
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    succeeded, value = self._pipes[rank].recv()
                except EOFError:
                    succeeded, value = False, "the process ended"
                (answers if succeeded else errors)[rank] = value
        if errors:
            self.close()
            raise RankError("\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(errors.items())))
        return [answers[rank] for rank in range(self.world_size)]

    def _start(self) -> None:
        self._directory = tempfile.TemporaryDirectory()
        store = Path(self._directory.name) / "store"
        for rank in range(self.world_size):
            here, there = _context.Pipe()
            process = _context.Process(target=_serve, args=(rank, self.world_size, str(store), there))
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._directory is not None:
            self._directory.cleanup()
        self._processes, self._pipes, self._directory = [], [], None


def _serve(rank: int, world_size: int, store: str, pipe: Connection) -> None:
    warnings.simplefilter("error")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_SECONDS / 2),
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
