"""When the collectives of a pass run where parameters are sharded: stage 3.

A gather needs every rank of the shard group, also those that take another branch (experts, mixed text and
image batches). Two modes, per kind of pass:

- Agreed: before each gather every rank says which unit it needs next, or that its pass is over, and all
  take part in what any of them needs. Right whatever the ranks do, at one control message a gather.
- Programmed: once a pass went the same way on all ranks, the next ones follow its ``Program`` without
  asking, in buckets and ahead of use. A rank that skips a unit still takes part. A rank that needs
  something that the program doesn't give leads all of them back to agreement, for good.

A pass ends with one agreement on all ranks, in which each says that it needs nothing more.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

import torch

from zero_core.comm.collectives import Communicator
from zero_core.sharding.flat_parameter import FlatParameter
from zero_core.sharding.held_tables import HeldTables
from zero_core.sharding.program import Event, Kind, Program, compile_program, digest
from zero_core.sharding.schedule import Reductions
from zero_core.sharding.unit import Pass, Unit

NOTHING = -1


class Sort(Enum):
    """Passes that go alike."""

    TRAINING_FORWARD = auto()
    EVALUATION_FORWARD = auto()
    BACKWARD = auto()


@dataclass(frozen=True)
class Lookahead:
    """Elements of the buckets, see ``ZeroConfig``."""

    gather_bucket: int
    prefetch: int
    reduce_bucket: int


@dataclass
class Course:
    """How far one pass has come on this rank."""

    sort: Sort
    program: Program | None
    next_step: int = 0
    deviated: bool = False
    watched: bool = False
    """The first forward of its sort, in which all tables are held."""
    events: list[Event] = field(default_factory=list)
    needed: set[int] = field(default_factory=set)
    """Units."""
    done: set[int] = field(default_factory=set)
    """Flat parameters whose gradient this rank has."""
    reduced: set[int] = field(default_factory=set)
    """Flat parameters whose reduction has been started, on all ranks alike."""


class ShardedSchedule:
    def __init__(self, communicator: Communicator, lookahead: Lookahead, depth: int) -> None:
        self.current = Pass.IDLE
        self._communicator = communicator
        self._lookahead = lookahead
        self._units: list[Unit] = []
        self._flats: list[FlatParameter] = []
        self._number: dict[FlatParameter, int] = {}
        """Of every flat parameter: its position in ``_flats``."""
        self._programs: dict[Sort, Program] = {}
        self._unpredictable: set[Sort] = set()
        self._held = HeldTables()
        """They are there through all of a pass, as the root is."""
        self._lingering: Unit | None = None
        """The table that ran last: a loss in pieces calls it once more for each, on some ranks more often."""
        self._course: Course | None = None
        self._reductions = Reductions(communicator, depth)
        self._reduce = True

    def adopt(self, units: list[Unit]) -> None:
        """Called again when what is trainable has changed: what backward did is no guide any more."""
        self._units = units
        self._held.adopt(units)
        self._flats = [flat for unit in units for flat in unit.flats]
        self._number = {flat: number for number, flat in enumerate(self._flats)}
        self._programs.pop(Sort.BACKWARD, None)

    # Passes.

    def open_forward(self) -> None:
        self.settle()
        training = torch.is_grad_enabled()
        self._open(Sort.TRAINING_FORWARD if training else Sort.EVALUATION_FORWARD)
        self.current = Pass.FORWARD
        for unit in self._units:
            unit.start_forward()
        assert self._course is not None
        self._course.watched = self._held.open_forward(training)
        self._need_held()

    def _need_held(self) -> None:
        for unit in self._held:
            self.need(unit)

    def close_forward(self) -> None:
        """The model's own forward has returned. A loss in chunks may still call a part of it."""
        course = self._course
        assert course is not None
        self._let_go()
        self._held.close_forward()
        if course.sort is Sort.EVALUATION_FORWARD:
            self.settle()
        elif course.program is not None:
            self._perform(len(course.program.steps))

    def abandon(self) -> None:
        """The model's forward has failed."""
        self._held.abandon()

    def open_backward(self, reduce: bool) -> None:
        if self.current is not Pass.FORWARD:
            # This rank had nothing to run forward: it still takes part in what the others gathered.
            self.open_forward()
        self.settle()
        self._open(Sort.BACKWARD)
        self._reduce = reduce
        self.current = Pass.BACKWARD
        self._need_held()
        for unit in self._units:
            if unit.passed and unit not in self._held:
                # This rank has nothing to add: the others must not wait for it.
                self._finish(unit.trainable_flats)

    def close_backward(self) -> None:
        for unit in self._units:
            self._finish(unit.trainable_flats)
        self.settle()
        self._reductions.close()

    def settle(self) -> None:
        """End the pass that is open, if any: this rank needs nothing more of it."""
        course = self._course
        if course is not None:
            if course.program is not None:
                self._perform(len(course.program.steps))
            while not self._agree(NOTHING):
                pass
            self._course = None
        self._lingering = None
        for unit in self._units:
            unit.release()
        self.current = Pass.IDLE

    def _open(self, sort: Sort) -> None:
        self._course = Course(sort, self._programs.get(sort))

    # What units tell.

    def need(self, unit: Unit) -> None:
        course = self._course
        if course is None:
            raise RuntimeError(
                f"unit {unit.name or 'of the model itself'} ran outside of a forward of the model, where "
                "stage 3 has no parameters: call the engine, or use `with engine.full_parameters():`"
            )
        event = Event(Kind.NEED, unit.index)
        if self._lingering is not unit:
            self._let_go()
        if not unit.is_table or not course.events or course.events[-1] != event:
            course.events.append(event)
        course.needed.add(unit.index)
        if course.program is not None:
            position = course.program.position_of_need.get(unit.index)
            if position is not None and position >= course.next_step:
                self._perform(position + 1)
            elif not unit.present:
                self._perform(len(course.program.steps))
                course.program = None
                course.deviated = True
        while not unit.present:
            self._agree(unit.index)
        unit.wait()

    def used(self, unit: Unit) -> None:
        """Keep what is needed again, as far as is known; release the rest."""
        course = self._course
        assert course is not None
        needs = len(unit.modules) if course.program is None else course.program.needs[unit.index]
        if unit.calls >= needs and unit not in self._held:
            if unit.is_table:
                self._lingering = unit
            else:
                unit.release()

    def _let_go(self) -> None:
        if self._lingering is not None:
            self._lingering.release()
            self._lingering = None

    def ready(self, unit: Unit) -> None:
        # Released first, so that the reduction's buffers can have the memory.
        passed = unit.passed and unit not in self._held
        if passed or (unit.complete and unit.trains_whole):
            unit.release()
        self._finish([flat for flat in unit.trainable_flats if passed or flat.gradient.complete])

    def _finish(self, flats: list[FlatParameter]) -> None:
        """Their gradients can be reduced, as far as this rank is concerned."""
        course = self._course
        assert course is not None
        for flat in flats:
            number = self._number[flat]
            if number not in course.done:
                course.done.add(number)
                course.events.append(Event(Kind.DONE, number))
        program = course.program
        while program is not None and course.next_step < len(program.steps):
            event = program.steps[course.next_step].event
            if event.kind is Kind.NEED or event.index not in course.done:
                break
            self._perform(course.next_step + 1)

    # Programmed.

    def _perform(self, until: int) -> None:
        """Take the program's steps up to ``until``, those of other ranks' needs included."""
        course = self._course
        assert course is not None
        assert course.program is not None
        while course.next_step < until:
            step = course.program.steps[course.next_step]
            course.next_step += 1
            for index in step.gathers:
                self._join_gather(self._units[index])
            if step.gathers:
                self._read_ahead(course.program, course.next_step)
            if step.reductions:
                self._start_reductions(step.reductions)
            if step.event.kind is Kind.NEED and step.event.index not in course.needed:
                self._units[step.event.index].release()

    def _read_ahead(self, program: Program, position: int) -> None:
        """Start to read what the next step with gathers will need."""
        following = (step.gathers for step in program.steps[position:] if step.gathers)
        for index in next(following, ()):
            self._units[index].read_ahead()

    def _join_gather(self, unit: Unit) -> None:
        if unit.present:
            unit.take_part()
        else:
            unit.start_gather()

    def _start_reductions(self, numbers: tuple[int, ...]) -> None:
        course = self._course
        assert course is not None
        course.reduced.update(numbers)
        if self._reduce:
            self._reductions.start([self._flats[number] for number in numbers])

    # Agreed.

    def _agree(self, demand: int) -> bool:
        """Say what this rank needs and what it has finished, and do what all agree on.

        True when no rank needs anything more: the pass is over.
        """
        course = self._course
        assert course is not None
        count = len(self._flats)
        mine = torch.zeros(3 + 2 * count, dtype=torch.int64)
        mine[0], mine[1], mine[2] = demand, digest(course.events), course.deviated
        for number in course.done:
            mine[3 + number] = 1
        for number in course.reduced if self._reduce else ():
            mine[3 + count + number] = self._flats[number].gradient.pending
        everyones = self._communicator.tell_row(mine)
        demands = sorted({int(d) for d in everyones[:, 0]} - {NOTHING})
        for index in demands:
            self._join_gather(self._units[index])
            if index not in course.needed:
                self._units[index].release()
        if course.sort is Sort.BACKWARD:
            finished = everyones[:, 3 : 3 + count].all(dim=0)
            for number in reversed(range(count)):
                if finished[number] and number not in course.reduced:
                    self._start_reductions((number,))
        if demands:
            return False
        late = everyones[:, 3 + count :].any(dim=0)
        if late.any():
            self._start_reductions(tuple(number for number in range(count) if late[number]))
        self._learn(course, everyones)
        return True

    def _learn(self, course: Course, everyones: torch.Tensor) -> None:
        """Follow this pass from now on if it went alike on all ranks; never, if one left its program."""
        if everyones[:, 2].any():
            self._programs.pop(course.sort, None)
            self._unpredictable.add(course.sort)
            return
        alike = bool((everyones[:, 1] == everyones[0, 1]).all())
        if course.program is None and not course.watched and alike and course.sort not in self._unpredictable:
            look = self._lookahead
            self._programs[course.sort] = compile_program(
                course.events,
                [unit.size for unit in self._units],
                [flat.layout.size for flat in self._flats],
                gather_bucket=look.gather_bucket,
                prefetch=look.prefetch,
                reduce_bucket=look.reduce_bucket,
            )
