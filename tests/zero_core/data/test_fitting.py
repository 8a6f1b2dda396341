from itertools import chain

import numpy as np
import pytest

from zero_core.data.fitting import CannotSplit, Fate, Fitted, fit
from zero_core.data.tokenize import TokenizedExample


def sequence(length: int, first_target: int) -> TokenizedExample:
    """Token i is number i; all from ``first_target`` on are learnt."""
    numbers = np.arange(length, dtype=np.int32)
    return TokenizedExample(numbers, numbers >= first_target)


def learnt(fitted: Fitted) -> list[tuple[int, int]]:
    """Each token that is predicted and counted, after the one it is predicted from."""
    return [
        (int(part.input_ids[place - 1]), int(part.input_ids[place]))
        for (part,) in fitted.samples
        for place in range(1, len(part))
        if part.target_mask[place]
    ]


def test_what_fits_stays_as_it_is() -> None:
    sample = (sequence(8, 3),)
    for overflow in ("truncate", "drop", "split"):
        assert fit(sample, 8, overflow, running_text=False) == Fitted(Fate.WHOLE, (sample,))


def test_a_cut_example_learns_no_end_of_its_own() -> None:
    ((part,),) = fit((sequence(9, 3),), 8, "truncate", running_text=True).samples
    assert part.input_ids.tolist() == list(range(8))
    assert part.target_mask.tolist() == [False] * 3 + [True] * 5


def test_what_has_nothing_to_learn_is_left_out() -> None:
    assert fit((sequence(9, 9),), 20, "truncate", running_text=True) == Fitted(Fate.NO_TARGET)
    assert fit((sequence(9, 8),), 8, "truncate", running_text=True) == Fitted(Fate.NO_TARGET)
    # The first token has no predecessor to be predicted from.
    assert fit((sequence(1, 0),), 8, "truncate", running_text=True) == Fitted(Fate.NO_TARGET)
    assert fit((sequence(9, 3),), 8, "drop", running_text=True) == Fitted(Fate.TOO_LONG)


def test_both_answers_of_a_pair_are_cut_alike_and_kept_or_left_out_together() -> None:
    (pair,) = fit((sequence(5, 3), sequence(20, 3)), 8, "truncate", running_text=False).samples
    assert [len(answer) for answer in pair] == [5, 8]
    assert fit((sequence(5, 3), sequence(20, 3)), 8, "drop", running_text=False).fate is Fate.TOO_LONG
    assert fit((sequence(5, 3), sequence(20, 8)), 8, "truncate", running_text=False).fate is Fate.NO_TARGET
    with pytest.raises(CannotSplit, match="has 20 tokens, more than max_length 8"):
        fit((sequence(5, 3), sequence(20, 3)), 8, "split", running_text=False)


@pytest.mark.parametrize("max_length", [2, 3, 4, 7, 8, 50, 99])
@pytest.mark.parametrize("first_target", [0, 1, 3, 4, 60])
def test_pieces_learn_each_token_once(max_length: int, first_target: int) -> None:
    whole = sequence(100, first_target)
    fitted = fit((whole,), max_length, "split", running_text=True)
    parts = [part for (part,) in fitted.samples]
    assert fitted.fate is Fate.SPLIT
    assert all(len(part) <= max_length for part in parts)
    # After its predecessor each, so nothing is predicted across a gap.
    assert learnt(fitted) == [(token - 1, token) for token in range(max(first_target, 1), 100)]
    # No more work than the text is long: half of a piece at least is new.
    assert sum(map(len, parts)) <= 4 * len(whole)
    lead = list(range(first_target))
    if first_target <= min(max_length // 2, max_length - 2):
        assert all(part.input_ids[:first_target].tolist() == lead for part in parts)
    else:
        assert list(chain(*(part.input_ids.tolist()[1:] for part in parts)))[-1] == 99
