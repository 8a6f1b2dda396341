"""A table that is read outside of its own module's forward is there, at stage 3 too."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from tests.zero_core.engine_runs import whole_weights
from tests.zero_core.ranks import RankPool
from tests.zero_core.reference import relative_difference
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine


class Functional(nn.Module):
    """Its logits use the embedding's matrix without a module; the adapter is an ordinary table."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.adapter = nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return linear(self.adapter(x), self.embedding.weight)


def build() -> Functional:
    torch.manual_seed(2)
    return Functional()


def batch(step: int) -> Tensor:
    return torch.randint(0, 16, (12, 3), generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    return cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())


def train(stage: int) -> tuple[dict[str, Tensor], list[float], set[str]]:
    """Weights, elements sent over the trainable ones in each step, and the tables that are held."""
    engine = ZeroEngine(build(), ZeroConfig(stage=stage), AdamWConfig(lr=1e-2))
    elements = []
    for step in range(4):
        part = batch(step)[dist.get_rank() :: dist.get_world_size()]
        engine.backward(loss_of(engine, part))  # type: ignore[arg-type]
        report = engine.step()
        assert report is not None
        elements.append(report.elements_sent / engine.trainable_elements)
    held = {unit.name for unit in getattr(engine._schedule, "_held", ())}
    weights = whole_weights(engine)
    engine.close()
    return weights, elements, held


def plain() -> dict[str, Tensor]:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(4):
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_trains_as_in_plain_pytorch_and_is_gathered_once_a_pass(
    pools: dict[int, RankPool], stage: int
) -> None:
    for rank, (weights, elements, held) in enumerate(pools[3].run(train, stage)):
        if rank == 0:
            assert relative_difference(weights, plain()) < 1e-5
        assert elements == [3 if stage == 3 else 2] * 4
        assert held == ({"embedding"} if stage == 3 else set())
