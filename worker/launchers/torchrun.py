"""Ranks on this host, by ``torchrun``."""

import os
import signal
import subprocess
import sys

from worker import sweep
from worker.host import cuda_devices
from worker.launchers import Launch
from worker.launchers.environment import rank_environment, usable_cores

_SHUTDOWN_SECONDS = 5
"""From the death of a rank until torchrun kills those that wait for it in a collective."""


class Torchrun:
    """``module`` is what each rank runs, with the attempt's directory as its only argument."""

    def __init__(self, module: str = "zero_core.train") -> None:
        self._module = module
        self._tag: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: set[sweep.ProcessIdentity] = set()

    def start(self, launch: Launch) -> None:
        self._tag = sweep.attempt_tag(launch.job_id, launch.epoch)
        devices = cuda_devices() if launch.device == "cuda" else []
        # Output goes to the supervisor's own: the attempt's log.
        self._process = subprocess.Popen(
            self._command(launch),
            env=rank_environment(launch, os.environ, devices, usable_cores()),
            stdin=subprocess.DEVNULL,
        )

    def poll(self) -> int | None:
        assert self._process is not None
        return self._process.poll()

    def request_stop(self) -> None:
        assert self._tag is not None
        for rank in set(sweep.ranks(self._tag)) - self._asked:
            rank.signal(signal.SIGTERM)
            self._asked.add(rank)

    def stop(self, timeout: float) -> bool:
        if self._tag is None:
            return True
        nothing_left = sweep.kill_all(self._tag, timeout)
        if nothing_left and self._process is not None:
            self._process.wait()
        return nothing_left

    def _command(self, launch: Launch) -> list[str]:
        bound_to_this_process = [sys.executable, "-m", "zero_core.training.parent_death", str(os.getpid())]
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        options = [
            "--standalone",
            "--local-addr=127.0.0.1",
            f"--nproc-per-node={len(launch.gpus)}",
            # Restarts are the supervisor's: it knows the checkpoints and the lease.
            "--max-restarts=0",
            f"--shutdown-timeout={_SHUTDOWN_SECONDS}",
            # Else in the system's temporary folder, where a killed attempt leaves it.
            f"--log-dir={launch.attempt_dir / 'torchrun'}",
        ]
        return [*bound_to_this_process, *torchrun, *options, "-m", self._module, str(launch.attempt_dir)]
