"""Loss and accuracy on the validation file: the mean over all its target tokens, on any number of ranks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from zero_core.data.batches import collate, split
from zero_core.data.dataset import Dataset
from zero_core.engine import ZeroEngine
from zero_core.training.loss import to_device, token_loss


@dataclass(frozen=True)
class Evaluation:
    loss: float
    """Mean negative log-likelihood of a target token (nats)."""

    accuracy: float
    """Share of target tokens that were the model's first choice."""

    tokens: int


def evaluate(
    engine: ZeroEngine,
    dataset: Dataset,
    micro_batch_size: int,
    pad_id: int,
    between_batches: Callable[[], None],
) -> Evaluation:
    """Collective: each rank runs as many micro-batches as any other, empty ones included."""
    communicator = engine.communicator
    sums = torch.zeros(3, dtype=torch.float64)
    engine.model.eval()
    try:
        with torch.no_grad():
            for ranks in split(list(dataset), communicator.world_size, micro_batch_size):
                between_batches()
                batch = to_device(collate(ranks[communicator.rank], pad_id), engine.device)
                loss = token_loss(engine, batch)
                sums += torch.tensor([loss.total, loss.correct, loss.tokens], dtype=torch.float64)
    finally:
        engine.model.train()
    total, correct, tokens = communicator.agree(sums).tolist()
    return Evaluation(total / max(tokens, 1), correct / max(tokens, 1), int(tokens))
