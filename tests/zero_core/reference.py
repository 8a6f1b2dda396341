"""Plain single-process PyTorch on the same global batch: what every plan of the engine is held against."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from tests.zero_core.token_loss import IGNORED
from zero_core import AdamWConfig

VOCABULARY = 64
EXAMPLES = 12
"""Of one global batch: cut evenly by 1 to 4 ranks and by 1 or 3 micro-batches."""
LENGTH = 10
OPTIMIZER = AdamWConfig(lr=2e-3, weight_decay=0.1)


def build_model(tied: bool, layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        use_cache=False,
        tie_word_embeddings=tied,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def global_batch(step: int) -> dict[str, Tensor]:
    """Examples whose numbers of target tokens differ widely: a mean of means would show."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, VOCABULARY, (EXAMPLES, LENGTH), generator=generator)
    labels = ids.clone()
    prompt = torch.randint(0, LENGTH - 1, (EXAMPLES,), generator=generator)
    labels[torch.arange(LENGTH)[None, :] < prompt[:, None]] = IGNORED
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def mean_loss(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), batch["labels"][:, 1:].reshape(-1))


@dataclass(frozen=True)
class Trajectory:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


@cache
def trajectory(tied: bool, clipping: float | None, steps: int) -> Trajectory:
    torch.set_num_threads(1)
    model = build_model(tied)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    kept = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": OPTIMIZER.weight_decay}, {"params": kept, "weight_decay": 0.0}],
        lr=OPTIMIZER.lr,
        betas=OPTIMIZER.betas,
        eps=OPTIMIZER.eps,
    )
    losses, norms = [], []
    for step in range(steps):
        loss = mean_loss(model, global_batch(step))
        loss.backward()
        limit = float("inf") if clipping is None else clipping
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trajectory(losses, norms, {n: p.detach().clone() for n, p in model.named_parameters()})


def relative_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """L2 norm of the difference of all weights over the norm of theirs."""
    assert ours.keys() == theirs.keys()
    difference = sum(float((ours[n].double() - theirs[n].double()).square().sum()) for n in theirs)
    size = sum(float(theirs[n].double().square().sum()) for n in theirs)
    return float((difference / size) ** 0.5)
