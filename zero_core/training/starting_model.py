"""Log-probabilities under the model that training starts from, computed once and kept with the job.

So no second model is in memory. A later attempt of the job reads them: it starts from a checkpoint, and the
starting model would have to be loaded for them alone.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from zero_core.checkpoints import durable
from zero_core.data.batches import every_item
from zero_core.data.dataset import Dataset
from zero_core.engine import ZeroEngine
from zero_core.training.micro_batches import MicroBatches, score


def log_probs_at_start(
    engine: ZeroEngine,
    dataset: Dataset,
    micro_batches: MicroBatches,
    directory: Path,
    between_batches: Callable[[], None],
) -> NDArray[np.float32]:
    """(samples, sequences): sums over each sequence's target tokens (nats). Collective.

    The engine must hold the starting model, unless ``directory`` has the answer.
    """
    path = directory / f"log-probs-at-start-{_digest(dataset)}.npy"
    group = engine.communicator
    if group.agree(torch.tensor([float(path.is_file())])).item() == group.world_size:
        kept: NDArray[np.float32] = np.load(path, allow_pickle=False)
        return kept
    found = _compute(engine, dataset, micro_batches, between_batches)
    if group.rank == 0:
        durable.write_array(path, found)
    return found


def _compute(
    engine: ZeroEngine, dataset: Dataset, micro_batches: MicroBatches, between_batches: Callable[[], None]
) -> NDArray[np.float32]:
    sums = torch.zeros(len(dataset), dataset.sequences)
    engine.model.eval()
    try:
        with torch.no_grad():
            for batch in micro_batches.of_dataset(dataset):
                between_batches()
                log_probs = score(engine, batch).log_probs
                if batch.sequences:
                    each = log_probs.new_zeros(batch.sequences).index_add(0, batch.sequence_of, log_probs)
                    sums[[item.index for item in batch.items]] = each.view(-1, dataset.sequences).cpu()
    finally:
        engine.model.train()
    if dist.is_initialized():
        # Of each sample one rank alone knows; the others add zeros.
        dist.all_reduce(sums)
    return sums.numpy()


def _digest(dataset: Dataset) -> str:
    """Of all that the model reads and is asked."""
    digest = hashlib.sha256()
    for item in every_item(dataset):
        for sequence in item.sample:
            digest.update(len(sequence).to_bytes(8, "little"))
            digest.update(sequence.input_ids.tobytes())
            digest.update(sequence.target_mask.tobytes())
    return digest.hexdigest()[:16]
