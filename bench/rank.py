"""``python -m bench.rank TASK ANSWER``: one rank of a run; rank 0 writes the measurement."""

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from bench.measure import measure
from bench.task import Measurement, Task
from zero_core.training.parent_death import PARENT_VARIABLE, die_with_parent


def main(task: Path, answer: Path) -> None:
    die_with_parent(int(os.environ[PARENT_VARIABLE]))
    # The peers' own deprecation notices; nobody reads a rank's output unless it fails.
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    asked = TypeAdapter(Task).validate_json(task.read_bytes())
    device = torch.device("cpu")
    if asked.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    measurement = measure(asked, device)
    if dist.get_rank() == 0:
        answer.write_bytes(TypeAdapter(Measurement).dump_json(measurement))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
