import numpy as np
import pytest

from zero_core.data.dataset import Dataset


def dataset(samples: int, sequences: int = 1, per_line: int = 1) -> Dataset:
    """Sequence i is [i, i]."""
    ids = np.repeat(np.arange(samples * sequences, dtype=np.int32), 2)
    return Dataset(
        input_ids=ids,
        target_mask=np.ones(len(ids), dtype=np.bool_),
        offsets=np.arange(0, len(ids) + 1, 2),
        sequences=sequences,
        lines=1 + np.arange(samples) // per_line,
    )


def firsts(data: Dataset) -> list[int]:
    return [int(sample[0].input_ids[0]) for sample in data]


def test_a_sample_has_one_sequence_or_two() -> None:
    assert [[int(s.input_ids[0]) for s in sample] for sample in dataset(3, 2)] == [[0, 1], [2, 3], [4, 5]]
    assert len(dataset(3, 2)) == len(dataset(3)) == 3
    for outside in (3, -1):
        with pytest.raises(IndexError):
            dataset(3)[outside]


def test_a_split_is_decided_by_the_seed_alone() -> None:
    data = dataset(100, sequences=2)
    train, valid = data.split(0.1, seed=3)
    assert (len(train), len(valid), train.sequences, valid.sequences) == (90, 10, 2, 2)
    assert sorted(firsts(train) + firsts(valid)) == firsts(data)
    assert firsts(train) == sorted(firsts(train))
    assert firsts(valid) == sorted(firsts(valid)) == firsts(dataset(100, sequences=2).split(0.1, seed=3)[1])
    assert firsts(valid) != firsts(data.split(0.1, seed=4)[1])
    # These very ones, in every release and on every machine.
    assert firsts(dataset(10).split(0.3, seed=42)[1]) == [1, 2, 6]


@pytest.mark.parametrize(
    ("samples", "share", "held_out"), [(2, 0.5, 1), (2, 0.01, 1), (10, 0.5, 5), (3, 0.5, 2)]
)
def test_each_part_has_an_example(samples: int, share: float, held_out: int) -> None:
    train, valid = dataset(samples).split(share, 0)
    assert (len(train), len(valid)) == (samples - held_out, held_out)


def test_pieces_of_a_line_stay_together() -> None:
    data = dataset(40, per_line=4)
    train, valid = data.split(0.2, seed=1)
    assert (len(train), len(valid)) == (32, 8)
    assert not {number // 4 for number in firsts(train)} & {number // 4 for number in firsts(valid)}
    with pytest.raises(ValueError, match="at least 2 lines"):
        dataset(4, per_line=4).split(0.2, seed=1)
