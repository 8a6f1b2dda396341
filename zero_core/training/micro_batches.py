"""The micro-batches of one rank: dealt, collated, on the device, and scored by the engine."""

from collections.abc import Iterator, Sequence

from zero_core.config.train import TrainConfig
from zero_core.data.batches import Batch, Dealer, Item, collate, every_item
from zero_core.data.dataset import Dataset
from zero_core.engine import ZeroEngine
from zero_core.models.token_scores import TokenScores

_WINDOW = 64
"""Micro-batches a rank that a pass over a dataset deals at once: examples of like length lie together."""


class MicroBatches:
    def __init__(self, engine: ZeroEngine, train: TrainConfig, pad_id: int, *, packed: bool) -> None:
        self._engine = engine
        self._train = train
        self._pad_id = pad_id
        self._packed = packed
        self._rank = engine.communicator.rank

    def of_step(self, items: Sequence[Item]) -> list[list[Item]]:
        """This rank's part of a global batch; every rank has as many micro-batches."""
        return self._mine(items, self._train.per_device_train_batch_size)

    def of_dataset(self, dataset: Dataset) -> Iterator[Batch]:
        """This rank's part of a whole dataset; every rank has as many micro-batches."""
        rows = self._train.per_device_eval_batch_size
        items = sorted(every_item(dataset), key=lambda item: item.length, reverse=True)
        window = _WINDOW * rows * self._engine.communicator.world_size
        for first in range(0, len(items), window):
            for mine in self._mine(items[first : first + window], rows):
                yield self.collate(mine)

    def collate(self, items: Sequence[Item]) -> Batch:
        return collate(items, self._pad_id, packed=self._packed).to(self._engine.device)

    def _mine(self, items: Sequence[Item], rows: int) -> list[list[Item]]:
        world_size = self._engine.communicator.world_size
        dealer = Dealer(world_size, rows, self._train.per_device_max_tokens, self._packed)
        return [ranks[self._rank] for ranks in dealer.deal(items)]


def score(engine: ZeroEngine, batch: Batch) -> TokenScores:
    """One forward of the model, which a ``TokenScorer`` has been given. Collective at stage 3."""
    scores: TokenScores = engine(**batch.inputs, positions=batch.positions, targets=batch.targets)
    return scores
