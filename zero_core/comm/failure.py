"""One rank's failure ends all of them within seconds, and each names the first cause.

A rank that fails writes its cause to the store that the process group started from, where the first to
write wins, and closes its groups: whoever waits for it gets an error at once instead of a time-out, finds
the cause in the store and raises PeerFailed with it.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

from zero_core.comm.collectives import Communicator
from zero_core.errors import PeerFailed

_engines = itertools.count()
"""Counts alike on all ranks, since an engine is made by all of them."""


class FailureBoard:
    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        number = next(_engines)
        self._store: Store | None = None
        if communicator.world_size > 1:
            self._store = PrefixStore(f"zero_core/failure/{number}", _get_default_store())

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Around what all ranks do together. Afterwards a failed engine can't be used."""
        try:
            yield
        except BaseException as error:
            if self._store is None:
                raise
            mine = f"rank {self._communicator.rank} failed first: {type(error).__name__}: {error}"
            first = self._store.compare_set("cause", "", mine).decode()
            self._communicator.close()
            if first == mine:
                raise
            raise PeerFailed(first) from error
