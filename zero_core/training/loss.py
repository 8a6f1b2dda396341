"""Next-token loss of a micro-batch, over its target tokens only."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from zero_core.data.batches import IGNORED


@dataclass(frozen=True)
class TokenLoss:
    mean: Tensor
    """Mean negative log-likelihood of the target tokens (nats); 0, but differentiable, without any."""

    tokens: int
    """Target tokens."""

    total: float
    """Sum of the negative log-likelihoods."""

    correct: int
    """Target tokens that were the model's first choice."""


def token_loss(model: Any, batch: dict[str, Tensor]) -> TokenLoss:
    """``batch`` has ``input_ids``, ``attention_mask`` and ``labels``, each (rows, length).

    Position t predicts token t + 1. Only the rows of the logits that predict a target are widened to
    fp32, so padding and prompts cost no memory there.
    """
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"][:, 1:]
    targets = labels[labels != IGNORED]
    predicting = logits[:, :-1][labels != IGNORED].float()
    tokens = targets.numel()
    if tokens == 0:
        return TokenLoss(logits.sum() * 0.0, 0, 0.0, 0)
    total = cross_entropy(predicting, targets, reduction="sum")
    correct = (predicting.detach().argmax(-1) == targets).sum()
    return TokenLoss(total / tokens, tokens, total.item(), int(correct.item()))


def to_device(batch: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
