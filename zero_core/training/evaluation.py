"""An objective's metrics on the validation set: means over all of it, on any number of ranks."""

from collections.abc import Callable

import torch

from zero_core.data.dataset import Dataset
from zero_core.engine import ZeroEngine
from zero_core.training.methods.objective import Objective
from zero_core.training.micro_batches import MicroBatches, score


def evaluate(
    engine: ZeroEngine,
    dataset: Dataset,
    objective: Objective,
    micro_batches: MicroBatches,
    between_batches: Callable[[], None],
) -> dict[str, float]:
    """Collective: each rank runs as many micro-batches as any other, empty ones included."""
    sums = torch.zeros(1 + len(objective.sums), dtype=torch.float64)
    engine.model.eval()
    try:
        with torch.no_grad():
            for batch in micro_batches.of_dataset(dataset):
                between_batches()
                loss = objective.loss(score(engine, batch), batch)
                sums += torch.tensor([loss.weight, *loss.sums], dtype=torch.float64)
    finally:
        engine.model.train()
    weight, *totals = engine.communicator.agree(sums).tolist()
    return objective.metrics(dict(zip(objective.sums, totals, strict=True)), weight)
