"""The collectives of one pass in the order that all ranks of a shard group run them. Pure, without torch.

A pass is one forward or one backward. Its events are what ranks do in it: need a unit's parameters, have
a flat gradient. A program says at which event which units are gathered and which are reduced. Every rank
performs every event in this order, whether or not it has a use for the unit: so no two ranks can wait
for each other, whatever branches they take.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum


class Kind(IntEnum):
    NEED = 0
    """A module of the unit is about to run, or a gradient has reached its output."""
    DONE = 1
    """Backward has finished with a flat gradient: it can be reduced."""


@dataclass(frozen=True)
class Event:
    kind: Kind
    index: int
    """Of the unit that is needed, or of the flat parameter whose gradient is done."""


@dataclass(frozen=True)
class Step:
    """One event, with what every rank starts at it."""

    event: Event
    gathers: tuple[int, ...] = ()
    """Units."""
    reductions: tuple[int, ...] = ()
    """Flat parameters."""


@dataclass(frozen=True)
class Program:
    steps: list[Step]
    needs: list[int]
    """By unit: how often a rank needs it in the pass; between the first and the last it stays gathered."""

    position_of_need: dict[int, int] = field(default_factory=dict)
    """By unit: the step at which it is needed first."""

    def __post_init__(self) -> None:
        for position, step in enumerate(self.steps):
            if step.event.kind is Kind.NEED:
                self.position_of_need.setdefault(step.event.index, position)


def digest(events: Sequence[Event]) -> int:
    """A number that is the same for equal sequences, and hardly for others."""
    return zlib.crc32(
        bytes(byte for event in events for byte in (event.kind, *event.index.to_bytes(4, "little")))
    )


def compile_program(
    recorded: Sequence[Event],
    unit_sizes: Sequence[int],
    flat_sizes: Sequence[int],
    *,
    gather_bucket: int,
    prefetch: int,
    reduce_bucket: int,
) -> Program:
    """From what a pass did to what the next ones do: in buckets, and ahead of use.

    Sizes are elements. At the first need of a bucket it is gathered, unless it was before,
    and then the buckets after it up to ``prefetch`` elements, one at least where that isn't 0. A bucket
    of reductions starts when its last gradient is done.
    """
    needs = [0] * len(unit_sizes)
    events: list[Event] = []
    for event in recorded:
        if event.kind is Kind.NEED:
            needs[event.index] += 1
        if event.kind is Kind.DONE or needs[event.index] == 1:
            events.append(event)
    gathers = _ahead([e.index for e in events if e.kind is Kind.NEED], unit_sizes, gather_bucket, prefetch)
    reductions = {
        bucket[-1]: tuple(bucket)
        for bucket in buckets([e.index for e in events if e.kind is Kind.DONE], flat_sizes, reduce_bucket)
    }
    steps = [
        Step(event, gathers=gathers.get(event.index, ()))
        if event.kind is Kind.NEED
        else Step(event, reductions=reductions.get(event.index, ()))
        for event in events
    ]
    return Program(steps, needs)


def buckets(indices: Sequence[int], sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Neighbours together while they stay under ``limit`` elements; each in one bucket, at least alone."""
    packed: list[list[int]] = []
    filled = 0
    for index in indices:
        if not packed or filled + sizes[index] > limit:
            packed.append([])
            filled = 0
        packed[-1].append(index)
        filled += sizes[index]
    return packed


def _ahead(
    order: Sequence[int], sizes: Sequence[int], bucket_limit: int, prefetch: int
) -> dict[int, tuple[int, ...]]:
    """For the first unit of each bucket: the units to gather when it is needed."""
    packed = buckets(order, sizes, bucket_limit)
    gathers: dict[int, tuple[int, ...]] = {}
    started = 0
    for position, bucket in enumerate(packed):
        until = max(started, position + 1)
        ahead = sum(sizes[unit] for later in packed[position + 1 : until] for unit in later)
        while prefetch and until < len(packed):
            size = sum(sizes[unit] for unit in packed[until])
            if ahead and ahead + size > prefetch:
                break
            ahead += size
            until += 1
        gathers[bucket[0]] = tuple(unit for later in packed[started:until] for unit in later)
        started = until
    return gathers
