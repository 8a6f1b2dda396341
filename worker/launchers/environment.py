"""What a rank may see of the worker's environment: an allow-list, so that no secret gets there."""

import os
from collections.abc import Mapping

from worker.launchers import Launch
from worker.sweep import ATTEMPT_VARIABLE, attempt_tag

_ALLOWED = frozenset(
    {
        "HOME",
        "LANG",
        "LC_ALL",
        "LC_CTYPE",
        "LD_LIBRARY_PATH",
        "PATH",
        "PYTHONPATH",
        "TMPDIR",
        "TZ",
        "USER",
        "VIRTUAL_ENV",
    }
)
_ALLOWED_PREFIXES = ("CUDA_", "NCCL_", "GLOO_", "NVIDIA_", "TORCH_", "PYTORCH_")


def rank_environment(
    launch: Launch, worker: Mapping[str, str], devices: list[str], cores: int
) -> dict[str, str]:
    """Environment of torchrun and its ranks. ``devices``: CUDA's name of each of the host's GPUs."""
    environment = {
        name: value
        for name, value in worker.items()
        if name in _ALLOWED or name.startswith(_ALLOWED_PREFIXES)
    }
    # All ranks are on this host: names that a resolver may not know must not decide whether they connect.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
    cuda = launch.device == "cuda"
    return environment | {
        ATTEMPT_VARIABLE: attempt_tag(launch.job_id, launch.epoch),
        "CUDA_VISIBLE_DEVICES": ",".join(devices[index] for index in launch.gpus) if cuda else "",
        "OMP_NUM_THREADS": str(max(1, cores // len(launch.gpus))),
        # Models are files on this host: nothing is fetched during a run.
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def usable_cores() -> int:
    """Cores that this process may run on: fewer than the machine's in a container with a CPU set."""
    return len(os.sched_getaffinity(0))
