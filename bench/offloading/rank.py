"""One process of one run: ``python -m bench.offloading.rank TASK ANSWER``."""

import resource
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from bench import memory
from bench.engines import ADAMW, Setup
from bench.models import SHAPES, build_model
from bench.offloading.task import OffloadRun, OffloadTask
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine
from zero_core.config.offload import OffloadConfig

CPU = torch.device("cpu")

Train = Callable[[Tensor], tuple[Tensor, float]]
"""One step on tokens: the loss, and when the update began."""


def main(task_path: Path, answer_path: Path) -> None:
    task = TypeAdapter(OffloadTask).validate_json(task_path.read_bytes())
    if task.limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (task.limit, task.limit))
    train = {"shardyard": _ours, "plain": _plain, "deepspeed": _deepspeed}[task.engine](task)
    run = OffloadRun()
    for step in range(task.steps):
        # The same two batches in turn, so that the loss falls.
        generator = torch.Generator().manual_seed(step % 2)
        tokens = torch.randint(
            0, SHAPES[task.shape].vocabulary, (task.rows, task.length), generator=generator
        )
        begin = time.perf_counter()
        loss, update = train(tokens)
        run.seconds.append(time.perf_counter() - begin)
        run.update_seconds.append(time.perf_counter() - update)
        run.losses.append(loss.item())
    run.peak_bytes = memory.peak(CPU)
    answer_path.write_bytes(TypeAdapter(OffloadRun).dump_json(run))


def _ours(task: OffloadTask) -> Train:
    with torch.device("meta"):
        model = build_model(SHAPES[task.shape], task.length)
    _compute_buffers(model)
    engine = ZeroEngine(
        model,
        ZeroConfig(
            stage=3,
            offload=OffloadConfig(task.optimizer, task.parameters),
            scratch_directory=str(task.scratch),
        ),
        AdamWConfig(lr=ADAMW["lr"], weight_decay=ADAMW["weight_decay"]),
        weights=_Drawn(),
        device=CPU,
    )

    def train(tokens: Tensor) -> tuple[Tensor, float]:
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        update = time.perf_counter()
        engine.step()
        return loss.detach(), update

    return train


class _Drawn:
    """Weights that are drawn when they are asked for: a model larger than the limit never lies in memory."""

    def read(self, name: str, start: int, length: int) -> Tensor:
        if "norm" in name:
            return torch.ones(length)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {start}".encode()))
        return torch.empty(length).normal_(0, 0.02, generator=generator)

    def stored_dtype(self, name: str) -> torch.dtype:
        return torch.float32


def _compute_buffers(model: nn.Module) -> None:
    """Of rotary embeddings: they come from the configuration, not from a file."""
    for module in model.modules():
        if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
            module.__init__(module.config)  # type: ignore[misc]


def _plain(task: OffloadTask) -> Train:
    model = build_model(SHAPES[task.shape], task.length)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW, fused=True)

    def train(tokens: Tensor) -> tuple[Tensor, float]:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        update = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), update

    return train


def _deepspeed(task: OffloadTask) -> Train:
    from bench.engines import deepspeed

    disk = {"device": "nvme", "nvme_path": str(task.scratch)}
    zero = {"stage": 3, "offload_optimizer": disk, "offload_param": disk}
    setup = Setup("fp32", CPU, task.rows, stage=3)
    model = build_model(SHAPES[task.shape], task.length)
    step = deepspeed.train_with(model, setup, config={"zero_optimization": zero})
    return lambda tokens: (step(tokens).loss, time.perf_counter())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
