"""Which examples make a step, and how they are dealt to the ranks.

Samples are counted by one global cursor over all epochs; step s takes samples [s * B, (s + 1) * B). Which
example a sample is depends on the seed and the cursor alone, so ranks, micro-batches and resumes never
change the trajectory. ``split`` only decides who computes what.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zero_core.config.train import TrainConfig
from zero_core.data.dataset import Dataset
from zero_core.data.tokenize import TokenizedExample

IGNORED = -100
"""Label of a position that is no target."""


def epoch_of(sample: int, examples: int) -> int:
    return sample // examples


def example_of(sample: int, examples: int, seed: int) -> int:
    """The example that sample number ``sample`` is: each exactly once an epoch, in an order of its own."""
    return int(_order(examples, seed, epoch_of(sample, examples))[sample % examples])


@lru_cache(maxsize=2)
def _order(examples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    # Sorting raw bits: NumPy promises that a seed gives the same bits in every release, but not that
    # ``permutation`` makes the same order of them.
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(examples)
    return np.argsort(bits, kind="stable")


def global_batch(dataset: Dataset, step: int, train: TrainConfig) -> list[TokenizedExample]:
    """The examples of step ``step`` (from 0) on all ranks together, in sample order."""
    first = step * train.train_batch_size
    return [
        dataset[example_of(sample, len(dataset), train.seed)]
        for sample in range(first, first + train.train_batch_size)
    ]


def split(
    examples: Sequence[TokenizedExample], world_size: int, micro_batch_size: int
) -> list[list[list[TokenizedExample]]]:
    """``result[accumulation][rank]`` is a micro-batch; each example is in exactly one.

    Longest first, so that micro-batches hold examples of like length (little padding), ranks that work
    at the same time have like lengths (little waiting), and the largest memory is needed at the start.
    Every rank has the same number of micro-batches, the last of which may be empty.
    """
    by_length = sorted(examples, key=len, reverse=True)
    micro_batches = [
        by_length[first : first + micro_batch_size] for first in range(0, len(by_length), micro_batch_size)
    ]
    while len(micro_batches) % world_size:
        micro_batches.append([])
    return [micro_batches[first : first + world_size] for first in range(0, len(micro_batches), world_size)]


def collate(examples: Sequence[TokenizedExample], pad_id: int) -> dict[str, Tensor]:
    """``input_ids``, ``attention_mask`` and ``labels`` (rows, length), int64, padded on the right.

    Without examples there is one row of padding with no target: its rank still takes part in every
    collective. Its attention is on, since a row that attends to nothing gives NaN in some kernels.
    """
    length = max((len(example) for example in examples), default=2)
    shape = (max(len(examples), 1), length)
    input_ids = torch.full(shape, pad_id, dtype=torch.int64)
    labels = torch.full(shape, IGNORED, dtype=torch.int64)
    attention_mask = (
        torch.zeros(shape, dtype=torch.int64) if examples else torch.ones(shape, dtype=torch.int64)
    )
    for row, example in enumerate(examples):
        ids = torch.from_numpy(example.input_ids.astype(np.int64))
        mask = torch.from_numpy(example.target_mask.copy())
        input_ids[row, : len(ids)] = ids
        attention_mask[row, : len(ids)] = 1
        labels[row, : len(ids)] = ids.where(mask, IGNORED)
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
