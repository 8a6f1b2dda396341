"""What a rank holds while it trains one step, from a model's profile: bytes by category, moment by moment.

The step goes through the moments of ``profile.Timeline``. In each there are the activations that the profile
was recorded with, and around them what the placement keeps of parameters, gradients and optimizer state, as
``sharding`` does it. The largest sum is the step's peak, and what an allocator without losses would hold.

On the CPU a rank holds more. Buffers of the engine lie in its arena and activations in glibc's heap, and
neither gets what the other has free; and the heap itself has holes, since a block of a size does not fit
where an aligned one of the same size has been (``HEAP_FACTOR``).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from zero_core.config.zero import ZeroConfig
from zero_core.planner.formulas import STORED_BYTES, Storage
from zero_core.planner.profile import BatchShape, ModelProfile, ParameterProfile, Timeline, UnitProfile

_NARROW: Mapping[str, Storage] = {"bfloat16": "bf16", "float16": "fp16"}

HEAP_FACTOR = 1.35
"""Resident bytes of the heap for each byte of activations, measured (``bench.predict``)."""


@dataclass(frozen=True)
class StepBytes:
    """One moment of a step."""

    parameters: int
    """Kept ones, buffers, and what is gathered or decoded just now."""

    gradients: int
    optimizer: int
    """Master weights included, where they are no working copy."""

    activations: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations


def step_peak(
    profile: ModelProfile, config: ZeroConfig, world_size: int, timeline: Timeline, shape: BatchShape
) -> StepBytes:
    """The fullest moment of a rank's step, from the second step on: the first has no optimizer state yet."""
    moments = step_moments(profile, config, world_size, timeline, shape)
    return max(moments, key=lambda moment: moment.total)


def resident_peak(
    profile: ModelProfile, config: ZeroConfig, world_size: int, timeline: Timeline, shape: BatchShape
) -> int:
    """What a rank on the CPU holds at most, beyond the interpreter and its libraries."""
    moments = list(step_moments(profile, config, world_size, timeline, shape))
    kept = min(moment.parameters for moment in moments)
    arena = max(moment.parameters - kept + moment.gradients for moment in moments)
    heap = max(moment.activations for moment in moments)
    return kept + moments[0].optimizer + arena + round(HEAP_FACTOR * heap)


def step_moments(
    profile: ModelProfile, config: ZeroConfig, world_size: int, timeline: Timeline, shape: BatchShape
) -> Iterator[StepBytes]:
    """Those of the step's last micro-batch, and the update."""
    rank = _Rank(profile, config, world_size)
    for index, moment in enumerate(timeline.moments):
        around = [other.unit for other in timeline.moments[index : index + 2] if other.phase == moment.phase]
        if moment.phase == "backward":
            done = [other.unit for other in timeline.moments[:index] if other.phase == "backward"]
            gradients = rank.gradients(done, moment.unit)
        else:
            gradients = rank.gradients_before()
        yield StepBytes(
            rank.kept + rank.brought(around), gradients, rank.optimizer, moment.activations(shape)
        )
    yield StepBytes(rank.kept, rank.all_gradients, rank.optimizer, 0)


class _Rank:
    def __init__(self, profile: ModelProfile, config: ZeroConfig, world_size: int) -> None:
        self._shards = config.shard_size or world_size
        # A group of one has nothing to share with.
        self._stage = config.stage if self._shards > 1 else 0
        self._units = {unit.name: _Unit.of(unit, profile, config) for unit in profile.units}
        self._accumulates = config.gradient_accumulation_steps > 1
        units = self._units.values()
        of_parameters = self._shards if self._stage >= 3 else 1
        self.kept = profile.buffer_bytes + round(sum(unit.kept for unit in units) / of_parameters)
        elements = sum(unit.trainable for unit in units)
        of_optimizer = self._shards if self._stage >= 1 else 1
        masters = 8 if profile.precision == "fp32" else 12
        self.optimizer = masters * elements // of_optimizer
        self._width = 4 if self._accumulates else int(STORED_BYTES[profile.precision])
        of_gradients = self._shards if self._stage >= 2 else 1
        self.all_gradients = self._width * elements // of_gradients

    def brought(self, names: list[str]) -> int:
        """What is there of the unit at work and of the next beside what is kept."""
        units = [self._units[name] for name in names if name in self._units]
        return sum(unit.whole if self._stage >= 3 else unit.decoded for unit in units)

    def gradients_before(self) -> int:
        """Of earlier micro-batches."""
        return self.all_gradients if self._accumulates else 0

    def gradients(self, done: list[str], now: str) -> int:
        """Of the units whose backward is over, and of the one whose backward it is: that has them whole."""
        if self._accumulates:
            whole = self._unit_gradient(now)
            return self.all_gradients + (whole if self._stage >= 2 else 0)
        earlier = [self._unit_gradient(name) for name in done if name != now]
        if self._stage < 2:
            return sum(earlier) + self._unit_gradient(now)
        # The one before is on its way to the shards.
        under_way = earlier.pop() if earlier else 0
        return sum(earlier) // self._shards + under_way + self._unit_gradient(now)

    def _unit_gradient(self, name: str) -> int:
        return self._width * self._units[name].trainable if name in self._units else 0


@dataclass(frozen=True)
class _Unit:
    trainable: int
    """Elements."""

    kept: float
    """Bytes of its parameters, whole, as they are kept."""

    whole: int
    """Bytes of all its parameters in the dtype of compute."""

    decoded: int
    """The same of those that are kept in fewer bytes."""

    @classmethod
    def of(cls, unit: UnitProfile, profile: ModelProfile, config: ZeroConfig) -> "_Unit":
        working = STORED_BYTES[profile.precision]
        storages = {p.name: _storage(p, profile, config) for p in unit.parameters}
        narrow = [p.numel for p in unit.parameters if STORED_BYTES[storages[p.name]] < working]
        return cls(
            trainable=unit.trainable_elements,
            kept=sum(STORED_BYTES[storages[p.name]] * p.numel for p in unit.parameters),
            whole=round(working * sum(p.numel for p in unit.parameters)),
            decoded=round(working * sum(narrow)),
        )


def _storage(parameter: ParameterProfile, profile: ModelProfile, config: ZeroConfig) -> Storage:
    """How a parameter is kept (``sharding.assembly``)."""
    if parameter.trainable:
        return profile.precision
    if config.frozen_quantization is not None and parameter.linear:
        return config.frozen_quantization
    stored = _NARROW.get(parameter.stored_dtype, profile.precision)
    return min(stored, profile.precision, key=STORED_BYTES.__getitem__)
