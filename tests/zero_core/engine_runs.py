"""What the ranks of the pool run: a few steps of the engine on the reference's batches."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.zero_core.reference import OPTIMIZER, build_model, global_batch
from tests.zero_core.token_loss import token_loss
from zero_core import StepReport, ZeroConfig, ZeroEngine
from zero_core.checkpoints import checkpoint
from zero_core.memory.ledger import Usage


@dataclass
class Result:
    losses: list[float] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    memory: Usage = field(default_factory=dict)
    after_backward: Usage = field(default_factory=dict)
    elements: int = 0
    updated: int = 0
    """Elements that this rank's optimizer updates."""
    pieces: int = 0
    """Of parameters that they are in."""


def micro_batches(batch: dict[str, Tensor], accumulation: int) -> list[dict[str, Tensor]]:
    """This rank's micro-batches: ``accumulation`` parts of the global batch, each dealt to the ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return [
        {name: tensor.chunk(accumulation)[part][rank::world_size] for name, tensor in batch.items()}
        for part in range(accumulation)
    ]


def run_steps(engine: ZeroEngine, first: int, last: int, result: Result) -> None:
    accumulation = engine.config.gradient_accumulation_steps
    for step in range(first, last):
        total = torch.zeros(1, dtype=torch.float64)
        report = None
        for micro_batch in micro_batches(global_batch(step), accumulation):
            loss = token_loss(engine, micro_batch)
            engine.backward(loss.mean, loss.tokens)
            result.after_backward = engine.memory()
            report = engine.step()
            total += loss.total
        assert report is not None
        total = engine.communicator.agree(total)
        result.losses.append(total.item() / report.target_tokens)
        result.reports.append(report)


def train(config: ZeroConfig, tied: bool, steps: int) -> Result:
    """Train from scratch; the weights come back from rank 0 alone."""
    engine = ZeroEngine(build_model(tied), config, OPTIMIZER)
    result = Result(elements=engine.trainable_elements)
    run_steps(engine, 0, steps, result)
    finish(engine, result)
    return result


def finish(engine: ZeroEngine, result: Result) -> None:
    result.memory = engine.memory()
    owned = [owned.piece.length for owned in engine.optimizer.owned()]
    result.updated, result.pieces = sum(owned), len(owned)
    result.weights = whole_weights(engine)
    engine.close()


def whole_weights(engine: ZeroEngine) -> dict[str, Tensor]:
    with engine.full_parameters() as model:
        if dist.get_rank() == 0:
            return {name: p.detach().float().clone() for name, p in model.named_parameters()}
    return {}


def save_after(config: ZeroConfig, tied: bool, steps: int, path: Path, state: dict[str, Any]) -> Result:
    engine = ZeroEngine(build_model(tied), config, OPTIMIZER)
    result = Result(elements=engine.trainable_elements)
    run_steps(engine, 0, steps, result)
    checkpoint.save(engine, path, state)
    finish(engine, result)
    return result


def resume(config: ZeroConfig, tied: bool, path: Path, last: int) -> tuple[Result, dict[str, Any]]:
    engine = ZeroEngine(build_model(tied), config, OPTIMIZER)
    state = checkpoint.load(engine, path)
    result = Result(elements=engine.trainable_elements)
    run_steps(engine, engine.steps, last, result)
    finish(engine, result)
    return result, state
