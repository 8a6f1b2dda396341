"""The optimizer over a rank's masters: one update after the other, each over a bounded run of them."""

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch

from zero_core.config.offload import Tier
from zero_core.config.optimizer import OptimizerConfig
from zero_core.memory.arena import Arena
from zero_core.memory.ledger import Ledger
from zero_core.memory.tiers import Tiers
from zero_core.sharding.flat_parameter import FlatParameter
from zero_core.sharding.program import buckets
from zero_core.sharding.update import Described, Owned, Run, Update

UPDATED_AT_ONCE = 1 << 22
"""Elements: a call for each flat parameter would cost time. What lies off the device is brought so many at
a time, in whole blocks of the disk."""

CONVERTED_AT_ONCE = 1 << 20
"""The same in lower precision: the fp32 copies of so many gradients are still in the cache when the update
reads them, and so are the new weights when they are rounded."""


class ShardedOptimizer:
    def __init__(
        self,
        flats: list[FlatParameter],
        config: OptimizerConfig,
        lr_schedule: Callable[[int], float] | None,
        arena: Arena,
        ledger: Ledger,
        tiers: Tiers,
    ) -> None:
        self._config = config
        self._arena = arena
        self._tiers = tiers
        self._lr_schedule = lr_schedule
        self._ledger = ledger
        self._charged = 0
        self._with_state = 0
        """Pieces that have optimizer state."""
        self._flats: list[FlatParameter] = []
        self._updates: list[Update] = []
        self.add(flats)

    def add(self, flats: list[FlatParameter]) -> None:
        """Train ``flats`` from the next step on."""
        at_once = UPDATED_AT_ONCE if flats[0].policy.dtype == torch.float32 else CONVERTED_AT_ONCE
        runs = [run for flat in flats for run in _runs(flat, at_once)]
        sizes = [run.end - run.begin for run in runs]
        for together in buckets(range(len(runs)), sizes, at_once):
            update = Update([runs[index] for index in together], self._config, self._arena, self._tiers)
            self._updates.append(update)
        self._flats += flats
        self._tiers.settle()

    def lr_at(self, steps: int) -> float:
        return self._config.lr * (1.0 if self._lr_schedule is None else self._lr_schedule(steps))

    def step(self, lr: float, factor: float, used: dict[FlatParameter, list[bool]]) -> None:
        """Update this rank's masters with the reduced gradients times ``factor``, and publish them.

        ``used`` has an entry for each parameter of a flat one: an unused one is left alone, weight decay
        and momentum included, as torch leaves a parameter whose gradient is None.
        """
        for update in self._one_ahead():
            update.step(lr, factor, used)
        for flat in self._flats:
            # Also what is all padding here: every rank must know that its secondary shard is old.
            flat.forget_secondary()
        # torch makes a parameter's state at its first update.
        with_state = sum(update.with_state for update in self._updates)
        if with_state != self._with_state:
            self._with_state = with_state
            self._charge()

    def _one_ahead(self) -> Iterator[Update]:
        """Every update, while the next one's memory is being filled and the last one's is written."""
        for update, following in pairwise([*self._updates, None]):
            assert update is not None
            update.fetch()
            if following is not None:
                following.fetch()
            yield update
        self._tiers.settle()

    def owned(self, restore: bool = False) -> Iterator[Owned]:
        """Every piece with its state, valid until the next is asked for.

        With ``restore``, what was put into its tensors and its ``state`` by then is the piece's from now on.
        """
        for update in self._one_ahead():
            yield from update.owned(restore)
        if restore:
            self._charge()

    def described(self) -> Iterator[Described]:
        """Every piece in the same order, without what is not in memory."""
        for update in self._updates:
            yield from update.described()

    def _charge(self) -> None:
        """Account for the state that torch allocated since the last call."""
        held = sum(update.state_bytes() for update in self._updates)
        tier: Tier = "host" if self._flats[0].policy.homes.state == "host" else "device"
        if held >= self._charged:
            self._ledger.take("optimizer", held - self._charged, tier)
        else:
            self._ledger.give("optimizer", self._charged - held, tier)
        self._charged = held


def _runs(flat: FlatParameter, at_once: int) -> list[Run]:
    begin, end = flat.master_range
    size = end - begin
    return [Run(flat, at, min(at + at_once, size)) for at in range(0, size, at_once)]
