"""When the collectives of a backward run where parameters are whole: stages 0, 1 and 2.

Reductions start in one static order, the reverse of the flat parameters' order, whatever order gradients
arrive in on a rank: so two ranks can never pair the reductions of different ones. Nothing is gathered, so
a rank may wait here for another without keeping it from going on.

Frozen parameters may be kept encoded. They are whole too: each rank decodes a unit's when it needs them
and releases them after use, on its own.
"""

from collections import deque

import torch

from zero_core.comm.collectives import Communicator, Handle
from zero_core.sharding.flat_parameter import FlatParameter
from zero_core.sharding.held_tables import HeldTables
from zero_core.sharding.program import buckets
from zero_core.sharding.unit import Pass, Unit


class Reductions:
    """The reductions under way, at most ``depth`` buckets of them, which bounds their buffers.

    They have the backward of the next buckets to complete in, so that ranks need not be in step.
    """

    def __init__(self, communicator: Communicator, depth: int) -> None:
        self._communicator = communicator
        self._depth = depth
        self._buckets: deque[list[Handle]] = deque()

    def start(self, flats: list[FlatParameter]) -> None:
        """Start the reductions of one bucket, having finished the oldest if there are too many."""
        self.finish(leave=self._depth - 1)
        self._buckets.append([flat.gradient.reduce() for flat in flats])

    def close(self) -> None:
        """At the end of a backward: finish all. Collective."""
        self.finish(leave=0)
        self._communicator.release_all()

    def finish(self, leave: int) -> None:
        """Wait until at most ``leave`` buckets are under way."""
        while len(self._buckets) > leave:
            for handle in self._buckets.popleft():
                handle.wait()


class ReplicatedSchedule:
    """Parameters come from no other rank; gradients are reduced bucket by bucket in a static order."""

    def __init__(self, communicator: Communicator, bucket_size: int, depth: int) -> None:
        self.current = Pass.IDLE
        self._bucket_size = bucket_size
        self._buckets: list[list[FlatParameter]] = []
        self._next = 0
        self._reduce = True
        self._reductions = Reductions(communicator, depth)
        self._units: list[Unit] = []
        self._held = HeldTables()

    def adopt(self, units: list[Unit]) -> None:
        self._units = units
        self._held.adopt(units)
        flats = [flat for unit in reversed(units) for flat in reversed(unit.trainable_flats)]
        sizes = [flat.layout.size for flat in flats]
        packed = buckets(range(len(flats)), sizes, self._bucket_size)
        self._buckets = [[flats[index] for index in bucket] for bucket in packed]

    def need(self, unit: Unit) -> None:
        unit.start_gather()
        unit.wait()

    def used(self, unit: Unit) -> None:
        if unit.calls >= len(unit.modules) and unit not in self._held:
            unit.release()

    def ready(self, unit: Unit) -> None:
        """Start every reduction whose turn has come."""
        if unit.passed and unit not in self._held:
            unit.release()
        while self._reduce and self._next < len(self._buckets):
            if not all(flat.gradient.complete for flat in self._buckets[self._next]):
                return
            self._start_next()

    def open_forward(self) -> None:
        self.settle()
        self.current = Pass.FORWARD
        for unit in self._units:
            unit.start_forward()
        self._held.open_forward(torch.is_grad_enabled())
        self._need_held()

    def close_forward(self) -> None:
        self._held.close_forward()
        if not torch.is_grad_enabled():
            self.settle()

    def open_backward(self, reduce: bool) -> None:
        self.settle()
        self.current = Pass.BACKWARD
        self._next, self._reduce = 0, reduce
        self._need_held()

    def close_backward(self) -> None:
        while self._reduce and self._next < len(self._buckets):
            self._start_next()
        self._reductions.close()
        self.settle()

    def abandon(self) -> None:
        self._held.abandon()

    def settle(self) -> None:
        for unit in self._units:
            unit.release()
        self.current = Pass.IDLE

    def _need_held(self) -> None:
        for unit in self._held:
            self.need(unit)

    def _start_next(self) -> None:
        self._reductions.start(self._buckets[self._next])
        self._next += 1
