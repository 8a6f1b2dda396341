"""A small model with what real ones have, each part switched on by name, and plain PyTorch's run of it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from zero_core import AdamWConfig

Feature = Literal["tied", "frozen", "unused", "divergent", "lora", "batchnorm", "scalar", "twice"]
FEATURES = get_args(Feature)

VOCABULARY, WIDTH, LENGTH, ROWS = 32, 8, 4, 24
"""A global batch has 24 rows: whole micro-batches on 1 to 4 ranks with 1 or 2 of them a step."""
STEPS = 4
OPTIMIZER = AdamWConfig(lr=5e-3, weight_decay=0.1)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Featured(nn.Module):
    def __init__(self, feature: Feature) -> None:
        super().__init__()
        self.feature = feature
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if feature == "tied":
            self.head.weight = self.embedding.weight
        if feature == "frozen":
            self.blocks[1].requires_grad_(False)
            self.embedding.requires_grad_(False)
        if feature == "batchnorm":
            self.batchnorm = nn.BatchNorm1d(WIDTH)
        if feature == "scalar":
            self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, ids: Tensor, row: Tensor, step: int) -> Tensor:
        x = self.embedding(ids)
        x = self.blocks[1](self.blocks[0](x))
        if self.feature == "twice":
            x = self.blocks[0](x)
        if self.feature == "divergent":
            x = self._experts(x, row)
        elif self.feature != "unused" or step % 2:
            x = self.blocks[3](self.blocks[2](x))
        if self.feature == "batchnorm":
            x = self.batchnorm(x.transpose(1, 2)).transpose(1, 2)
        if self.feature == "scalar":
            x = x * self.scale
        return self.head(x)

    def _experts(self, x: Tensor, row: Tensor) -> Tensor:
        """Each row goes through one of two experts; an expert without rows doesn't run."""
        out = torch.zeros_like(x)
        for index, expert in enumerate((self.blocks[2], self.blocks[3])):
            mine = row % 2 == index
            if mine.any():
                out = out.index_put((mine.nonzero().squeeze(1),), expert(x[mine]))
        return out


def build(feature: Feature) -> nn.Module:
    torch.manual_seed(1)
    model = Featured(feature)
    if feature != "lora":
        return model
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["linear"], init_lora_weights=False))
    assert isinstance(adapted, nn.Module)
    return adapted


@dataclass(frozen=True)
class Batch:
    ids: Tensor
    labels: Tensor
    row: Tensor

    def part(self, micro_batch: int, accumulation: int, rank: int, world_size: int) -> "Batch":
        everything = (self.ids, self.labels, self.row)
        return Batch(*(t.chunk(accumulation)[micro_batch][rank::world_size] for t in everything))

    @property
    def tokens(self) -> int:
        return int((self.labels != -100).sum())


def global_batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels[torch.rand(ROWS, LENGTH, generator=generator) < 0.5] = -100
    return Batch(ids, labels, torch.arange(ROWS))


def summed_loss(model: Callable[..., Tensor], batch: Batch, step: int) -> Tensor:
    logits = model(ids=batch.ids, row=batch.row, step=step)
    return cross_entropy(logits.float().flatten(0, 1), batch.labels.flatten(), reduction="sum")


@dataclass(frozen=True)
class Plain:
    norms: list[float]
    values: dict[str, Tensor]
    """Parameters and buffers after the last step, in fp32."""
    moved: float
    """L2 norm of the way that the trained parameters went."""


@cache
def plain(feature: Feature, precision: str, accumulation: int = 1, world_size: int = 1) -> Plain:
    """One process: compute in ``precision`` on fp32 masters. The split matters to BatchNorm alone."""
    torch.set_num_threads(1)
    masters, model = build(feature), build(feature).to(DTYPES[precision])
    start = {name: p.detach().clone() for name, p in masters.named_parameters()}
    trained = [p for p in masters.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.dim() >= 2], "weight_decay": OPTIMIZER.weight_decay},
            {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=OPTIMIZER.lr,
    )
    norms = []
    for step in range(STEPS):
        tokens = _accumulate(model, step, accumulation, world_size)
        for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
            if parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float() / tokens, None
        norms.append(torch.nn.utils.clip_grad_norm_(trained, float("inf")).item())
        optimizer.step()
        optimizer.zero_grad()
        for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
            parameter.data.copy_(master)
    values = {name: p.detach() for name, p in masters.named_parameters()}
    buffers = {name: b.float() for name, b in model.named_buffers()}
    moved = sum(float((values[n] - start[n]).square().sum()) for n in start) ** 0.5
    return Plain(norms, values | buffers, moved)


def _accumulate(model: nn.Module, step: int, accumulation: int, world_size: int) -> int:
    """Gradients of the summed loss, part by part as ranks would; running statistics averaged over ranks."""
    batch = global_batch(step)
    before = {name: b.clone() for name, b in model.named_buffers()}
    after: dict[str, list[Tensor]] = {name: [] for name in before}
    for rank in range(world_size):
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
        for micro_batch in range(accumulation):
            summed_loss(model, batch.part(micro_batch, accumulation, rank, world_size), step).backward()
        for name, buffer in model.named_buffers():
            after[name].append(buffer.clone())
    for name, buffer in model.named_buffers():
        mean = torch.stack([b.double() for b in after[name]]).mean(0)
        buffer.copy_(mean)
    return batch.tokens
