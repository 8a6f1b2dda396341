"""Next-token loss of a padded micro-batch with whole logits: what plain PyTorch makes of it."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

IGNORED = -100
"""Label of a position that is no target."""


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
