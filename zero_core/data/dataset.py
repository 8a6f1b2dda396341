"""A prepared training file: a few flat arrays whatever the number of examples."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from zero_core.data.tokenize import Sample, TokenizedExample

_SPLIT_STREAM = 2**32 - 1
"""Beside the seed, so that a split draws other bits than the order of an epoch, which has its number."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """The usable samples, in the file's order."""

    input_ids: NDArray[np.int32]
    """(tokens,) All sequences after one another."""

    target_mask: NDArray[np.bool_]
    """(tokens,)"""

    offsets: NDArray[np.int64]
    """(sequences in all + 1,) Sequence i is tokens [offsets[i], offsets[i + 1])."""

    sequences: int = 1
    """Sequences of a sample: 1, or 2 where it is a pair of answers."""

    lines: NDArray[np.int64] | None = None
    """(samples,) Line of the file that each comes from; None where each has a line of its own."""

    chosen: NDArray[np.int64] | None = None
    """Which samples these are, where they are a part of what the arrays hold."""

    warnings: tuple[str, ...] = ()
    """What was odd about the file, in sentences."""

    truncated: int = 0
    """Examples that were cut at ``max_length``."""

    dropped: int = 0
    """Examples left out: too long, or no token to learn within ``max_length``."""

    def __len__(self) -> int:
        if self.chosen is not None:
            return len(self.chosen)
        return (len(self.offsets) - 1) // self.sequences

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        first = (index if self.chosen is None else int(self.chosen[index])) * self.sequences
        return tuple(self._sequence(sequence) for sequence in range(first, first + self.sequences))

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))

    def split(self, share: float, seed: int) -> "tuple[Dataset, Dataset]":
        """Two parts, the second with ``share`` of the lines: the same ones for the same seed, in any process.

        Samples of one line stay together: a piece of a text would tell about another. Each part keeps the
        file's order and has at least one line. Raises ValueError where there is only one.
        """
        assert self.chosen is None, "a part is not split again"
        lines = np.arange(len(self)) if self.lines is None else self.lines
        different = np.unique(lines)
        if len(different) < 2:
            raise ValueError("examples of at least 2 lines are needed to hold some out for validation")
        # Raw bits, as for the order of an epoch: NumPy promises that they never change.
        bits = np.random.PCG64(np.random.SeedSequence([seed, _SPLIT_STREAM])).random_raw(len(different))
        held_out = min(max(round(share * len(different)), 1), len(different) - 1)
        is_held_out = np.isin(lines, different[np.argsort(bits, kind="stable")[:held_out]])
        return self._part(~is_held_out), self._part(is_held_out)

    def _part(self, wanted: NDArray[np.bool_]) -> "Dataset":
        return Dataset(
            self.input_ids, self.target_mask, self.offsets, self.sequences, chosen=np.flatnonzero(wanted)
        )

    def _sequence(self, number: int) -> TokenizedExample:
        part = slice(self.offsets[number], self.offsets[number + 1])
        return TokenizedExample(self.input_ids[part], self.target_mask[part])
