"""What a rank measures while it trains: step times, growth of its peak memory, losses."""

import gc
import time
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor

from bench import memory
from bench.engines import ENGINES, Setup, Step, Train, load_engine
from bench.models import SHAPES, build_model
from bench.task import WARM_UP_STEPS, Case, Measurement, Task


def measure(task: Task, device: torch.device) -> list[Measurement]:
    """One measurement an engine, the same on every rank. Collective over the default process group."""
    builders = {name: load_engine(name) for name in task.engines}
    # Warms up what is imported on first use, so that it is not taken for memory of an engine.
    build_model(SHAPES["tiny"], task.case.sequence_length)
    gc.collect()
    before = memory.in_use(device)
    trains: dict[str, Train] = {}
    for name, build in builders.items():
        with device:
            model = build_model(SHAPES[task.case.model], task.case.sequence_length)
        trains[name] = build(model, Setup(task.case.precision, device, task.case.rows, ENGINES[name].stage))
        del model
    steps = _take_turns(trains, _tokens(task.case, device), task.case.steps, device)
    growth = _highest(memory.peak(device) - before)
    return [
        Measurement(
            engine=name,
            step_seconds=[seconds for seconds, _ in taken[WARM_UP_STEPS:]],
            losses=[_mean_of_ranks(step.loss) for _, step in taken],
            peak_growth=growth,
            elements_sent=taken[-1][1].elements_sent,
        )
        for name, taken in steps.items()
    ]


def _take_turns(
    trains: dict[str, Train], tokens: Tensor, steps: int, device: torch.device
) -> dict[str, list[tuple[float, Step]]]:
    """Every engine's steps with their seconds; who goes first changes from step to step."""
    taken: dict[str, list[tuple[float, Step]]] = {name: [] for name in trains}
    for index in range(steps):
        for name in list(trains) if index % 2 == 0 else list(reversed(trains)):
            _meet(device)
            start = time.perf_counter()
            step = trains[name](tokens)
            _meet(device)
            taken[name].append((time.perf_counter() - start, step))
    return taken


def _tokens(case: Case, device: torch.device) -> Tensor:
    """This rank's batch, (rows, sequence length). The same in every step, so that the loss must fall."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    size = (case.rows, case.sequence_length)
    return torch.randint(0, SHAPES[case.model].vocabulary, size, generator=generator).to(device)


def _meet(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def _highest(value: int) -> int:
    agreed = torch.tensor(value)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    return int(agreed.item())


def _mean_of_ranks(loss: Tensor) -> float:
    losses = [torch.zeros((), dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, loss.detach().to("cpu", torch.float64))
    return fmean(each.item() for each in losses)
