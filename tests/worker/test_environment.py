from pathlib import Path

import pytest

from worker.launchers import Launch
from worker.launchers.environment import rank_environment

SECRETS = {
    "DATABASE_URL": "postgresql://u:secret@h/d",
    "REDIS_URL": "redis://:secret@h",
    "SHARDYARD_WEBHOOK_KEY": "secret",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "HF_TOKEN": "secret",
    "OPENAI_API_KEY": "secret",
}


def launch(device: str, *gpus: int) -> Launch:
    return Launch("ftjob-1", 3, Path("a3"), device, gpus)


def test_only_what_is_allowed_passes() -> None:
    worker = SECRETS | {"PATH": "/bin", "HOME": "/home/x", "NCCL_DEBUG": "INFO", "RANDOM_THING": "1"}
    environment = rank_environment(launch("cpu", 0, 1), worker, [], cores=8)
    assert "secret" not in str(environment)
    assert environment.keys() & {"PATH", "HOME", "NCCL_DEBUG", "RANDOM_THING"} == {
        "PATH",
        "HOME",
        "NCCL_DEBUG",
    }
    assert environment["SHARDYARD_ATTEMPT"] == "ftjob-1-3"


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(8, 2, "4"), (2, 4, "1"), (7, 2, "3")])
def test_threads_share_the_cores(cores: int, ranks: int, threads: str) -> None:
    environment = rank_environment(launch("cpu", *range(ranks)), {}, [], cores)
    assert environment["OMP_NUM_THREADS"] == threads


def test_ranks_see_their_own_devices_only() -> None:
    devices = ["4", "5", "GPU-abc", "7"]
    environment = rank_environment(launch("cuda", 1, 2), {"CUDA_VISIBLE_DEVICES": "4,5"}, devices, 8)
    assert environment["CUDA_VISIBLE_DEVICES"] == "5,GPU-abc"
    assert rank_environment(launch("cpu", 0), {}, devices, 8)["CUDA_VISIBLE_DEVICES"] == ""
