"""Small models that are hard on an engine, and one way to train them: on the engine and in plain PyTorch.

A ``Case`` says what each rank does. In plain PyTorch one process does all of it, rank after rank, and the
gradient is the mean: the reference of a job whose ranks and micro-batches weigh alike.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zero_core import OptimizerConfig, ZeroConfig, ZeroEngine

WIDTH = 6
OPTIMIZER = OptimizerConfig("SGD", lr=0.2, weight_decay=0.1, options={"momentum": 0.9})
"""Not Adam, which would hide a gradient that is wrong by a factor."""


def inputs(part: int, rank: int, rows: int = 4) -> Tensor:
    """What ``rank`` reads in micro-batch ``part``, counted from the start of training."""
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(100 * part + rank))


def module_of(model: Any) -> Any:
    """The model, whether it is called through the engine or not."""
    return model.model if isinstance(model, ZeroEngine) else model


class Mixture(nn.Module):
    """A block with its experts inside: one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return torch.tanh(self.experts[expert](self.router(x)))


class Mixtures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Mixture(), Mixture()])

    def forward(self, x: Tensor, expert: int) -> Tensor:
        for position, block in enumerate(self.blocks):
            x = block(x, (expert + position) % 3)
        return x.square().mean()


class Experts(nn.Module):
    """Experts that are units of their own; with ``reentrant`` given, each is checkpointed that way."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH)) for _ in range(4)]
        )

    def forward(self, x: Tensor, route: list[int]) -> Tensor:
        x = self.stem(x)
        for expert in route:
            x = x + self._run(self.experts[expert], x)
        return x.square().mean()

    def _run(self, expert: nn.Module, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return expert(x)
        return checkpoint(expert, x, use_reentrant=self.reentrant)


class TwoTowers(nn.Module):
    """Text always, images sometimes."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.vision = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.merge = nn.Linear(WIDTH, WIDTH)

    def forward(self, text: Tensor, image: Tensor | None) -> Tensor:
        for block in self.text:
            text = torch.tanh(block(text))
        if image is not None:
            for block in self.vision:
                image = torch.tanh(block(image))
            text = text + self.merge(image)
        return text.square().mean(-1)


class Chunked(nn.Module):
    """A head that is called once for each chunk of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.lm_head = nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor, chunks: int) -> Tensor:
        """Hidden states with no chunks, else their loss."""
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.loss(x, chunks) if chunks else x

    def loss(self, x: Tensor, chunks: int) -> Tensor:
        return torch.cat([self.lm_head(chunk).logsumexp(-1) for chunk in x.chunk(chunks)]).mean()


class Shaped(nn.Module):
    """Parameters of any shapes, of which every element has a gradient of its own."""

    def __init__(self, shapes: list[tuple[int, ...]], dtypes: list[torch.dtype]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.randn(shape).to(dtype)) for shape, dtype in zip(shapes, dtypes, strict=True)]
        )

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            ramp = torch.arange(1, weight.numel() + 1).view(weight.shape) / (weight.numel() + 1)
            x = x + torch.sin(weight * ramp).sum()
        return torch.tanh(x)


class Shapes(nn.Module):
    """One block for each list of shapes, and one parameter of a last shape on its own."""

    def __init__(
        self,
        blocks: list[list[tuple[int, ...]]],
        own: tuple[int, ...] = (),
        lower: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        dtypes = [torch.float32, lower]
        self.blocks = nn.ModuleList(
            [Shaped(shapes, [dtypes[i % 2] for i in range(len(shapes))]) for shapes in blocks]
        )
        self.own = nn.Parameter(torch.randn(own))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x * (1.5 + self.own.sum())).square().mean()


class Tied(nn.Module):
    """A weight that two blocks share, and one that a block shares with the model's own head."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        blocks[2].weight = blocks[0].weight
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = blocks[1].weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).square().mean()


class TiedByUse(nn.Module):
    """An embedding whose weight the model itself reads, as the matrix of its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.embedding((x.sum(-1).abs() * 2).long() % 9)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (x @ self.embedding.weight.t()).logsumexp(-1)


class Pair(nn.Module):
    """Two layers in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Pair() for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Many(nn.Module):
    """Many small units of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [layer for _ in range(6) for layer in (nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH))]
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.square().mean()


class Normed(nn.Module):
    """Running statistics in every block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()) for _ in range(2)]
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean(-1)


class Dots(nn.Module):
    """Its gradient is its input, whatever the weights: what a step does has a closed form."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Dot(), Dot()])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([block(x) for block in self.blocks]).sum()


class Dot(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def nothing(module: nn.Module, step: int) -> None:
    """No change before a step."""


@dataclass(frozen=True)
class Case:
    """A course of training that differs between ranks."""

    model: Callable[[], nn.Module]

    loss: Callable[[Any, int, int], Tensor]
    """Of the model (or the engine), the micro-batch counted from the start, and the rank."""

    steps: int = 6

    prepare: Callable[[nn.Module, int], None] = nothing
    """Changes to the model before a step: what is frozen."""

    evaluate: Callable[[Any, int, int], Tensor] | None = None
    """Before each step, in evaluation mode and without gradients."""

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.model().float()
        self.prepare(model, 0)
        return model


@dataclass
class Outcome:
    """What one rank saw."""

    norms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Parameters and buffers."""


def on_engine(case: Case, config: ZeroConfig) -> Outcome:
    """Run by every rank."""
    engine = ZeroEngine(case.build(), config, OPTIMIZER)
    rank, accumulation = dist.get_rank(), config.gradient_accumulation_steps
    outcome = Outcome()
    for step in range(case.steps):
        case.prepare(engine.model, step)
        outcome.outputs += _evaluated(case, engine, step, rank)
        for part in range(step * accumulation, (step + 1) * accumulation):
            loss = case.loss(engine, part, rank)
            outcome.losses.append(loss.item())
            engine.backward(loss)
            report = engine.step()
        assert report is not None
        outcome.norms.append(report.grad_norm)
    with engine.full_parameters() as model:
        outcome.weights = state_of(model)
    engine.close()
    return outcome


def in_plain_pytorch(case: Case, config: ZeroConfig, world_size: int) -> list[Outcome]:
    """The same for each of ``world_size`` ranks; running statistics are averaged after each step."""
    torch.set_num_threads(1)
    model = case.build()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": OPTIMIZER.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD([g for g in groups if g["params"]], lr=OPTIMIZER.lr, **OPTIMIZER.options)
    outcomes = [Outcome() for _ in range(world_size)]
    accumulation = config.gradient_accumulation_steps
    for step in range(case.steps):
        case.prepare(model, step)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        after = []
        for rank, outcome in enumerate(outcomes):
            outcome.outputs += _evaluated(case, model, step, rank)
            model.load_state_dict(before, strict=False)
            for part in range(step * accumulation, (step + 1) * accumulation):
                loss = case.loss(model, part, rank)
                outcome.losses.append(loss.item())
                (loss / (world_size * accumulation)).backward()
            after.append({name: buffer.clone() for name, buffer in model.named_buffers()})
        for name, buffer in model.named_buffers():
            buffer.copy_(torch.stack([theirs[name].double() for theirs in after]).mean(0))
        limit = math.inf if config.gradient_clipping is None else config.gradient_clipping
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item()
        optimizer.step()
        optimizer.zero_grad()
        for outcome in outcomes:
            outcome.norms.append(norm)
    for outcome in outcomes:
        outcome.weights = state_of(model)
    return outcomes


def _evaluated(case: Case, model: Any, step: int, rank: int) -> list[Tensor]:
    if case.evaluate is None:
        return []
    module_of(model).eval()
    with torch.no_grad():
        output = case.evaluate(model, step, rank)
    module_of(model).train()
    return [output.clone()]


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, copied."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def assert_alike(ours: list[Outcome], theirs: list[Outcome]) -> None:
    """Every rank has the reference's values, each parameter on its own."""
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(vars(mine), vars(expected), rtol=2e-5, atol=2e-6)
