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


def measure(task: Task, device: torch.device) -> Measurement:
    """The same on every rank. Collective over the default process group."""
    build = load_engine(task.engine)
    # Warms up what is imported on first use, so that it is not taken for memory of the engine.
    build_model(SHAPES["tiny"], task.case.sequence_length)
    gc.collect()
    before = memory.in_use(device)
    with device:
        model = build_model(SHAPES[task.case.model], task.case.sequence_length)
    train = build(model, Setup(task.case.precision, device, task.case.rows, ENGINES[task.engine].stage))
    del model
    taken = _steps(train, _tokens(task.case, device), task.case.steps, device)
    return Measurement(
        engine=task.engine,
        step_seconds=[seconds for seconds, _ in taken[WARM_UP_STEPS:]],
        losses=[_mean_of_ranks(step.loss) for _, step in taken],
        peak_growth=_highest(memory.peak(device) - before),
        elements_sent=taken[-1][1].elements_sent,
    )


def _steps(train: Train, tokens: Tensor, count: int, device: torch.device) -> list[tuple[float, Step]]:
    """Every step with its seconds, from barrier to barrier."""
    taken = []
    for _ in range(count):
        _meet(device)
        start = time.perf_counter()
        step = train(tokens)
        _meet(device)
        taken.append((time.perf_counter() - start, step))
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
