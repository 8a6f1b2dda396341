"""Which samples make a step, how they are dealt to the ranks, and what a model reads of them.

A step takes samples from one epoch alone: an epoch's last batch is smaller, so that one epoch trains each
example once. Which example a sample is depends on the seed and its number alone, so ranks, micro-batches and
resumes never change the trajectory. ``deal`` only decides who computes what.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from zero_core.config.train import TrainConfig
from zero_core.data.dataset import Dataset
from zero_core.data.tokenize import Sample, TokenizedExample


@dataclass(frozen=True)
class Item:
    """One sample of a dataset, with its place there."""

    index: int
    sample: Sample

    @property
    def length(self) -> int:
        """Tokens of all its sequences."""
        return sum(len(sequence) for sequence in self.sample)

    @property
    def longest(self) -> int:
        """Tokens of its longest sequence."""
        return max(len(sequence) for sequence in self.sample)


@dataclass(frozen=True)
class Batch:
    """A micro-batch on one device: what the model reads, and what it is asked."""

    inputs: dict[str, Any]
    """Keyword arguments of the model's forward."""

    positions: Tensor
    """(targets,) int64: where in the flattened (rows * length) hidden states each target is predicted."""

    targets: Tensor
    """(targets,) int64: the tokens to predict."""

    sequence_of: Tensor
    """(targets,) int64: which sequence of the batch each target belongs to."""

    sequences: int
    """0 for a batch that only takes part: it has one target, which counts for nothing."""

    items: tuple[Item, ...]
    """The samples, whose sequences follow each other in this order."""

    tokens: int
    """Of all sequences, padding not counted."""

    slots: int
    """Tokens that the model computes, padding included."""

    def to(self, device: torch.device) -> "Batch":
        def moved(value: Any) -> Any:
            return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

        fields = {name: moved(value) for name, value in vars(self).items()}
        return Batch(**fields | {"inputs": {name: moved(value) for name, value in self.inputs.items()}})


# Which samples make a step.


def steps_per_epoch(examples: int, train: TrainConfig) -> int:
    return math.ceil(examples / train.train_batch_size)


def samples_of(step: int, examples: int, train: TrainConfig) -> range:
    """Numbers of the samples of step ``step`` (from 0), counted over all epochs."""
    epoch, batch = divmod(step, steps_per_epoch(examples, train))
    first = epoch * examples + batch * train.train_batch_size
    last = min(first + train.train_batch_size, (epoch + 1) * examples)
    if train.max_steps is None:
        last = min(last, train.total_samples(examples))
    return range(first, last)


def example_of(sample: int, examples: int, seed: int) -> int:
    """The example that sample number ``sample`` is: each exactly once an epoch, in an order of its own."""
    return int(_order(examples, seed, sample // examples)[sample % examples])


@lru_cache(maxsize=2)
def _order(examples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    # Sorting raw bits: NumPy promises that a seed gives the same bits in every release, but not that
    # ``permutation`` makes the same order of them.
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(examples)
    return np.argsort(bits, kind="stable")


def global_batch(dataset: Dataset, step: int, train: TrainConfig) -> list[Item]:
    """The samples of step ``step`` (from 0) on all ranks together, in sample order."""
    numbers = [
        example_of(sample, len(dataset), train.seed) for sample in samples_of(step, len(dataset), train)
    ]
    return [Item(number, dataset[number]) for number in numbers]


def every_item(dataset: Dataset) -> list[Item]:
    return [Item(index, sample) for index, sample in enumerate(dataset)]


# Who computes which of them.


@dataclass(frozen=True)
class Dealer:
    """How samples become micro-batches: as many as ``rows`` of them, or as fit into ``tokens``."""

    world_size: int
    rows: int
    tokens: int | None
    packed: bool
    """Samples are laid end to end; else each row is padded to the longest."""

    def deal(self, items: Sequence[Item]) -> list[list[list[Item]]]:
        """``result[accumulation][rank]`` is a micro-batch; each item is in exactly one.

        Micro-batches hold about as many tokens each, so that ranks wait little for each other; the fullest
        come first, so that the largest memory is needed at the start. Every rank has the same number of
        them, and some may be empty.
        """
        longest_first = sorted(items, key=lambda item: item.length, reverse=True)
        micro_batches = self._spread(longest_first) if self.packed else self._runs(longest_first)
        micro_batches.sort(key=_tokens, reverse=True)
        while len(micro_batches) % self.world_size:
            micro_batches.append([])
        return [
            micro_batches[first : first + self.world_size]
            for first in range(0, len(micro_batches), self.world_size)
        ]

    def _runs(self, longest_first: list[Item]) -> list[list[Item]]:
        """Of like length each, which is little padding."""
        runs: list[list[Item]] = []
        for item in longest_first:
            if runs and self._fits_padded([*runs[-1], item]):
                runs[-1].append(item)
            else:
                runs.append([item])
        return runs

    def _fits_padded(self, run: list[Item]) -> bool:
        if self.tokens is None:
            return len(run) <= self.rows
        rows = sum(len(item.sample) for item in run)
        return rows * max(item.longest for item in run) <= self.tokens

    def _spread(self, longest_first: list[Item]) -> list[list[Item]]:
        """Into as few rounds of all ranks as the limit allows, each item where there is least so far."""
        if self.tokens is None:
            rounds = math.ceil(len(longest_first) / (self.rows * self.world_size))
        else:
            rounds = math.ceil(_tokens(longest_first) / (self.tokens * self.world_size))
        while True:
            spread = self._spread_over(longest_first, rounds * self.world_size)
            if spread is not None:
                return spread
            rounds += 1

    def _spread_over(self, longest_first: list[Item], count: int) -> list[list[Item]] | None:
        """None if an item finds no room."""
        loads = [0] * count
        spread: list[list[Item]] = [[] for _ in range(count)]
        for item in longest_first:
            free = [place for place in range(count) if self._has_room(spread[place], loads[place], item)]
            if not free:
                return None
            place = min(free, key=loads.__getitem__)
            spread[place].append(item)
            loads[place] += item.length
        return spread

    def _has_room(self, micro_batch: list[Item], load: int, item: Item) -> bool:
        if self.tokens is None:
            return len(micro_batch) < self.rows
        return not micro_batch or load + item.length <= self.tokens


def _tokens(items: Sequence[Item]) -> int:
    return sum(item.length for item in items)


# What a model reads.


def collate(items: Sequence[Item], pad_id: int, *, packed: bool) -> Batch:
    """On the CPU. Position t of a sequence predicts its token t + 1, if that is to be learnt.

    Packed: ``input_ids`` and ``position_ids`` (1, tokens), and ``packed_lengths``, the sequences' lengths,
    which ``models.attention`` keeps apart. Else ``input_ids`` and ``attention_mask`` (rows, length), padded
    on the right.
    """
    sequences = [sequence for item in items for sequence in item.sample]
    if not sequences:
        return _takes_part(pad_id, packed=packed)
    lengths = [len(sequence) for sequence in sequences]
    stride = None if packed else max(lengths)
    starts = np.cumsum([0, *lengths[:-1]]) if stride is None else np.arange(len(lengths)) * stride
    places = [np.flatnonzero(sequence.target_mask[1:]) for sequence in sequences]
    positions = np.concatenate([start + place for start, place in zip(starts, places, strict=True)])
    targets = np.concatenate([s.input_ids[1:][place] for s, place in zip(sequences, places, strict=True)])
    return Batch(
        inputs=_packed(sequences, lengths) if stride is None else _padded(sequences, stride, pad_id),
        positions=torch.from_numpy(positions.astype(np.int64)),
        targets=torch.from_numpy(targets.astype(np.int64)),
        sequence_of=torch.repeat_interleave(torch.tensor([len(place) for place in places])),
        sequences=len(sequences),
        items=tuple(items),
        tokens=sum(lengths),
        slots=sum(lengths) if stride is None else stride * len(lengths),
    )


def _packed(sequences: list[TokenizedExample], lengths: list[int]) -> dict[str, Any]:
    ids = np.concatenate([sequence.input_ids for sequence in sequences]).astype(np.int64)
    positions = np.concatenate([np.arange(length) for length in lengths])
    return {
        "input_ids": torch.from_numpy(ids)[None],
        "position_ids": torch.from_numpy(positions)[None],
        # As it is to be handed on: attention goes by the lengths.
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool),
        "packed_lengths": tuple(lengths),
    }


def _padded(sequences: list[TokenizedExample], length: int, pad_id: int) -> dict[str, Any]:
    input_ids = torch.full((len(sequences), length), pad_id, dtype=torch.int64)
    attention_mask = torch.zeros((len(sequences), length), dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        input_ids[row, : len(sequence)] = torch.from_numpy(sequence.input_ids.astype(np.int64))
        attention_mask[row, : len(sequence)] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def _takes_part(pad_id: int, *, packed: bool) -> Batch:
    """For a rank without data, which still takes part in every collective.

    Its attention is on, since a row that attends to nothing gives NaN in some kernels.
    """
    filler = TokenizedExample(np.full(2, pad_id, dtype=np.int32), np.ones(2, dtype=np.bool_))
    return Batch(
        inputs=_packed([filler], [2]) if packed else _padded([filler], 2, pad_id),
        positions=torch.zeros(1, dtype=torch.int64),
        targets=torch.full((1,), pad_id, dtype=torch.int64),
        sequence_of=torch.zeros(1, dtype=torch.int64),
        sequences=0,
        items=(),
        tokens=0,
        slots=0,
    )
