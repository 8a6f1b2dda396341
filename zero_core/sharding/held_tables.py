"""The tables that stay through all of a pass, since something reads them outside of their own forward.

In the first forward of its kind, training or evaluation, all tables stay and are watched; later those do
that were seen to be read from outside (see ``outside_reads``).
"""

from collections.abc import Iterator

from zero_core.sharding.outside_reads import OutsideReads
from zero_core.sharding.unit import Unit


class HeldTables:
    def __init__(self) -> None:
        self._tables: list[Unit] = []
        self._watched: set[bool] = set()
        self._outside: set[Unit] = set()
        self._held: set[Unit] = set()
        self._watch: OutsideReads | None = None

    def adopt(self, units: list[Unit]) -> None:
        """Tables whose parameters are always there need no watching."""
        self._tables = [unit for unit in units if unit.is_table and unit.transient]

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._held

    def __iter__(self) -> Iterator[Unit]:
        """In the order of units."""
        return (table for table in self._tables if table in self._held)

    def open_forward(self, training: bool) -> bool:
        """True where this forward is watched."""
        if not self._tables or training in self._watched:
            return False
        self._watched.add(training)
        self._held.update(self._tables)
        self._watch = OutsideReads(self._tables)
        self._watch.__enter__()
        return True

    def close_forward(self) -> None:
        """The model's forward has returned."""
        if self._watch is not None:
            self._outside.update(self._watch.found)
            self._held = set(self._outside)
        self.abandon()

    def abandon(self) -> None:
        """The model's forward is over or has failed: watch nothing any more."""
        if self._watch is not None:
            watch, self._watch = self._watch, None
            watch.__exit__(None, None, None)
