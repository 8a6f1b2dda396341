import numpy as np
import pytest
import torch

from zero_core.config.train import TrainConfig
from zero_core.data.batches import collate, epoch_of, example_of, global_batch, split
from zero_core.data.dataset import Dataset
from zero_core.data.tokenize import TokenizedExample


def example(length: int, name: int = 0) -> TokenizedExample:
    """``name`` is its first token; the second half is to learn."""
    ids = np.arange(length, dtype=np.int32) + 10
    ids[0] = name
    return TokenizedExample(ids, np.arange(length) >= length // 2)


def dataset(examples: int) -> Dataset:
    lengths = np.random.default_rng(0).integers(2, 30, examples)
    parts = [example(int(length), name) for name, length in enumerate(lengths)]
    return Dataset(
        np.concatenate([part.input_ids for part in parts]),
        np.concatenate([part.target_mask for part in parts]),
        np.concatenate(([0], np.cumsum(lengths))),
        0,
        0,
    )


def names(examples: list[TokenizedExample]) -> list[int]:
    return [int(part.input_ids[0]) for part in examples]


def test_every_epoch_has_each_example_once_in_an_order_of_its_own() -> None:
    epochs = [[example_of(7 * epoch + i, 7, seed=1) for i in range(7)] for epoch in range(3)]
    assert [sorted(order) for order in epochs] == [list(range(7))] * 3
    assert len({tuple(order) for order in epochs}) == 3
    assert [epoch_of(sample, 7) for sample in (0, 6, 7, 14)] == [0, 0, 1, 2]


def test_the_order_is_fixed_for_ever() -> None:
    """Another order would change the trajectory of every run that is resumed by a newer release."""
    assert [example_of(i, 8, seed=42) for i in range(16)] == FIXED_ORDER
    assert [example_of(i, 8, seed=43) for i in range(16)] != FIXED_ORDER


FIXED_ORDER = [4, 1, 3, 6, 0, 7, 2, 5, 1, 2, 5, 3, 6, 0, 4, 7]


def test_steps_take_consecutive_samples_across_epochs() -> None:
    data, train = dataset(10), TrainConfig(train_batch_size=4, seed=3)
    taken = [name for step in range(5) for name in names(global_batch(data, step, train))]
    assert taken == [example_of(sample, 10, 3) for sample in range(20)]
    assert sorted(taken[:10]) == sorted(taken[10:]) == list(range(10))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 5])
@pytest.mark.parametrize("batch_size", [1, 8, 13])
def test_a_split_covers_the_batch_exactly_once(
    world_size: int, micro_batch_size: int, batch_size: int
) -> None:
    data = dataset(13)
    train = TrainConfig(train_batch_size=batch_size, per_device_train_batch_size=micro_batch_size)
    batch = global_batch(data, 2, train)
    parts = split(batch, world_size, micro_batch_size)
    assert len(parts) == train.accumulation_steps(world_size)
    assert all(len(ranks) == world_size for ranks in parts)
    micro_batches = [part for ranks in parts for part in ranks]
    assert all(len(part) <= micro_batch_size for part in micro_batches)
    assert sorted(names([one for part in micro_batches for one in part])) == sorted(names(batch))


def test_ranks_work_on_like_lengths_at_the_same_time() -> None:
    parts = split([example(length) for length in (3, 30, 4, 29, 10, 11, 2, 28)], 2, 2)
    assert [[[len(one) for one in rank] for rank in ranks] for ranks in parts] == [
        [[30, 29], [28, 11]],
        [[10, 4], [3, 2]],
    ]


def test_collate_pads_on_the_right_and_labels_targets_only() -> None:
    batch = collate([example(4, 1), example(2, 2)], pad_id=0)
    assert batch["input_ids"].tolist() == [[1, 11, 12, 13], [2, 11, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 12, 13], [-100, 11, -100, -100]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_labels_count_what_target_tokens_says() -> None:
    examples = list(dataset(20))
    labels = collate(examples, pad_id=0)["labels"]
    assert int((labels[:, 1:] != -100).sum()) == sum(one.target_tokens for one in examples)


def test_a_rank_without_examples_has_a_row_without_targets() -> None:
    batch = collate([], pad_id=5)
    assert batch["input_ids"].tolist() == [[5, 5]]
    assert batch["attention_mask"].tolist() == [[1, 1]]
    assert batch["labels"].tolist() == [[-100] * 2]
