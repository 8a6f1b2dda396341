"""What becomes of an example that is longer than ``max_length``: cut, split, or left out.

Pieces of a split example begin with the token before them, as context alone, so that each token to learn
is learnt once and after its predecessor. Before that stands what comes before the first token to learn
(a prompt, the beginning-of-sequence token), where it leaves half of the length to the piece itself.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from zero_core.config.train import Overflow
from zero_core.data.tokenize import Sample, TokenizedExample


class Fate(StrEnum):
    """What became of an example; the last two are left out."""

    WHOLE = "whole"
    CUT = "cut"
    SPLIT = "split"
    TOO_LONG = "too_long"
    NO_TARGET = "no_target"


class CannotSplit(ValueError):
    """A long example that is more than running text."""


@dataclass(frozen=True)
class Fitted:
    fate: Fate
    samples: tuple[Sample, ...] = ()
    """Each of its sequences has at most ``max_length`` tokens and a token to learn."""


def fit(sample: Sample, max_length: int, overflow: Overflow, running_text: bool) -> Fitted:
    """``running_text``: one sequence that still makes sense in pieces; raises CannotSplit for any other
    that would have to be split."""
    if not _teaches(sample):
        return Fitted(Fate.NO_TARGET)
    longest = max(len(sequence) for sequence in sample)
    if longest <= max_length:
        return Fitted(Fate.WHOLE, (sample,))
    if overflow == "drop":
        return Fitted(Fate.TOO_LONG)
    if overflow == "truncate":
        # Alike for both answers of a pair. A conversation that is cut keeps the ends of its earlier turns
        # and gets no new one: the model must not learn to stop where the file does not.
        short = tuple(_part(sequence, 0, max_length) for sequence in sample)
        return Fitted(Fate.CUT, (short,)) if _teaches(short) else Fitted(Fate.NO_TARGET)
    if not running_text:
        raise CannotSplit(
            f"has {longest} tokens, more than max_length {max_length}, and can't be split as raw text and "
            "completions can: set overflow to truncate or drop, or raise max_length"
        )
    pieces = ((piece,) for piece in _pieces(sample[0], max_length))
    return Fitted(Fate.SPLIT, tuple(piece for piece in pieces if _teaches(piece)))


def _teaches(sample: Sample) -> bool:
    return all(sequence.target_tokens for sequence in sample)


def _part(whole: TokenizedExample, start: int, end: int) -> TokenizedExample:
    return TokenizedExample(whole.input_ids[start:end], whole.target_mask[start:end])


def _pieces(whole: TokenizedExample, max_length: int) -> list[TokenizedExample]:
    lead = int(np.argmax(whole.target_mask))
    if lead > min(max_length // 2, max_length - 2):
        lead = 0
    room = max_length - lead
    pieces = [_part(whole, 0, max_length)]
    for start in range(max_length - 1, len(whole) - 1, room - 1):
        part = _part(whole, start, start + room)
        mask = np.concatenate((whole.target_mask[:lead], part.target_mask))
        mask[lead] = False
        pieces.append(TokenizedExample(np.concatenate((whole.input_ids[:lead], part.input_ids)), mask))
    return pieces
