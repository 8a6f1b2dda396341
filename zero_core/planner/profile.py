"""What one forward and backward of a model need, recorded once per model: parameters by unit, and activations
as polynomials of a micro-batch's shape. No torch; a profile travels as JSON.

A micro-batch goes through *moments*: the forward of each unit in the order of use, the loss, then the units
backward. Of each moment a profile has the most bytes of activations that are live in it, all that earlier
moments have left for backward included. States of the model, and gradients once a parameter's is complete,
are no activations.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from zero_core.config.train import Method, TrainConfig
from zero_core.config.zero import FrozenQuantization, Precision

VERSION = 1
"""Of the JSON document."""

Phase = Literal["forward", "backward"]

ROOT = ""
"""Name of the root unit: what is outside every other one, the loss included."""


class InvalidProfile(ValueError):
    """A document that is no profile of this version: record the model again."""

    code = "invalid_profile"


@dataclass(frozen=True)
class BatchShape:
    """What of one micro-batch decides how many bytes it takes."""

    sequences: int

    tokens: int
    """Positions, padding included. Of a model with several inputs: what its recorder counts."""

    pairs: int
    """Sum over the sequences of the square of their length: what masks and score matrices take."""

    longest: int
    """Length of the longest sequence, which is worked on at once."""

    square: int
    """Of ``longest``: a mask that all rows share."""

    targets: int
    """Positions that have a loss."""

    targets_at_once: int
    """Of these, the most whose logits exist together."""

    @classmethod
    def padded(cls, rows: int, length: int, targets: int, at_once: int | None = None) -> "BatchShape":
        """``rows`` of one ``length``; ``at_once``: see ``ModelProfile.targets_at_once``."""
        return cls(rows, rows * length, rows * length**2, length, length**2, targets, at_once or targets)

    @classmethod
    def packed(cls, lengths: Iterable[int], targets: int, at_once: int | None = None) -> "BatchShape":
        """Sequences end to end in one row."""
        each = list(lengths)
        return cls(
            len(each),
            sum(each),
            sum(n * n for n in each),
            max(each),
            max(each) ** 2,
            targets,
            at_once or targets,
        )


@dataclass(frozen=True)
class Bytes:
    """A number of bytes, linear in each figure of a ``BatchShape``."""

    constant: float = 0.0
    per_sequence: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0
    per_longest: float = 0.0
    per_square: float = 0.0
    per_target: float = 0.0
    per_target_at_once: float = 0.0

    def at(self, shape: BatchShape) -> int:
        return round(
            self.constant
            + self.per_sequence * shape.sequences
            + self.per_token * shape.tokens
            + self.per_pair * shape.pairs
            + self.per_longest * shape.longest
            + self.per_square * shape.square
            + self.per_target * shape.targets
            + self.per_target_at_once * shape.targets_at_once
        )


@dataclass(frozen=True)
class Moment:
    """One unit at work. The root's moments lie around those of the units inside it."""

    unit: str
    phase: Phase
    live: tuple[Bytes, ...]
    """Bytes of activations that are live at the same time: the largest of these at the shape in question."""

    def activations(self, shape: BatchShape) -> int:
        return max(each.at(shape) for each in self.live)


@dataclass(frozen=True)
class Timeline:
    """A micro-batch's moments, first to last, under one way to run it."""

    packed: bool
    checkpointed: bool
    """Blocks keep their inputs alone and compute their forward again in backward; that is within the
    backward moment here."""

    moments: tuple[Moment, ...]

    def peak(self, shape: BatchShape) -> int:
        return max(moment.activations(shape) for moment in self.moments)

    def forward_order(self) -> tuple[str, ...]:
        """Names of the units in the order of their first use."""
        return tuple(dict.fromkeys(moment.unit for moment in self.moments if moment.phase == "forward"))


@dataclass(frozen=True)
class ParameterProfile:
    name: str
    shape: tuple[int, ...]
    stored_dtype: str
    """In the model's files, as torch says it without its prefix: ``bfloat16``. Adapters start in
    ``float32``."""

    trainable: bool
    linear: bool
    """The weight of a linear layer inside a block, and nothing else: may be quantized when frozen."""

    tied: tuple[str, ...] = ()
    """Its further names."""

    @property
    def numel(self) -> int:
        elements = 1
        for size in self.shape:
            elements *= size
        return elements


@dataclass(frozen=True)
class UnitProfile:
    """What is gathered, reduced and freed together (``sharding.partition``)."""

    name: str
    parameters: tuple[ParameterProfile, ...]
    kept: Bytes
    """What its forward leaves for its backward, padded and not checkpointed."""

    kept_checkpointed: Bytes

    @property
    def trainable_elements(self) -> int:
        return sum(parameter.numel for parameter in self.parameters if parameter.trainable)


@dataclass(frozen=True)
class LoraShape:
    """Of ``LoraConfig``, what decides what there is to train and to keep."""

    r: int
    target_modules: tuple[str, ...] | Literal["all-linear"]
    exclude_modules: tuple[str, ...]
    modules_to_save: tuple[str, ...]
    quantization: FrozenQuantization | None


@dataclass(frozen=True)
class ModelProfile:
    model: str
    """What it was recorded of: a digest of the model's config."""

    method: Method
    lora: LoraShape | None
    precision: Precision
    """Of compute: the parameters' working copy and the activations."""

    device: str
    """Kind of the device whose kernels were asked: ``cpu`` or ``cuda``."""

    vocabulary: int
    hidden: int
    buffer_bytes: int
    """The model's buffers, which every rank holds whole."""

    units: tuple[UnitProfile, ...]
    """The root first where it has parameters, then in the order of registration."""

    timelines: tuple[Timeline, ...]
    """Padded ones first; packed ones are missing where the model can't pack."""

    @property
    def packs(self) -> bool:
        return any(timeline.packed for timeline in self.timelines)

    def timeline(self, *, packed: bool, checkpointed: bool) -> Timeline:
        """``packed`` asks for it where the model packs at all, as ``TrainConfig.packing`` does."""
        packed = packed and self.packs
        return next(
            timeline
            for timeline in self.timelines
            if (timeline.packed, timeline.checkpointed) == (packed, checkpointed)
        )

    def parameters(self) -> Iterator[ParameterProfile]:
        for unit in self.units:
            yield from unit.parameters

    def targets_at_once(self, targets: int, logits_bytes: int) -> int:
        """How many of ``targets`` have their logits at once (``models.token_scores``): pieces are even."""
        piece = max(1, logits_bytes // (4 * self.vocabulary)) if self.vocabulary else targets
        pieces = max(1, -(-targets // piece))
        return -(-targets // pieces)

    def to_json(self) -> str:
        return json.dumps({"version": VERSION} | asdict(self), default=list)

    @classmethod
    def from_json(cls, text: str | bytes) -> "ModelProfile":
        """Raises InvalidProfile."""
        try:
            document: dict[str, Any] = json.loads(text)
            version = document.pop("version")
            if version != VERSION:
                raise InvalidProfile(f"a profile of version {version}, not {VERSION}: record the model again")
            return _profile(document)
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise InvalidProfile(f"no profile of a model: {error!r}: record the model again") from error


def lora_shape(train: TrainConfig) -> LoraShape | None:
    lora = train.lora
    return None if lora is None else LoraShape(**{f.name: getattr(lora, f.name) for f in fields(LoraShape)})


def _profile(document: dict[str, Any]) -> ModelProfile:
    lora = document.pop("lora")
    units = tuple(_unit(unit) for unit in document.pop("units"))
    timelines = tuple(_timeline(timeline) for timeline in document.pop("timelines"))
    return ModelProfile(**document, lora=lora and _lora(lora), units=units, timelines=timelines)


def _lora(document: Mapping[str, Any]) -> LoraShape:
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in document.items()}
    return LoraShape(**values)


def _unit(document: Mapping[str, Any]) -> UnitProfile:
    parameters = tuple(
        ParameterProfile(**parameter | {"shape": tuple(parameter["shape"]), "tied": tuple(parameter["tied"])})
        for parameter in document["parameters"]
    )
    kept = Bytes(**document["kept"])
    return UnitProfile(document["name"], parameters, kept, Bytes(**document["kept_checkpointed"]))


def _timeline(document: Mapping[str, Any]) -> Timeline:
    moments = tuple(
        Moment(moment["unit"], moment["phase"], tuple(Bytes(**each) for each in moment["live"]))
        for moment in document["moments"]
    )
    return Timeline(document["packed"], document["checkpointed"], moments)
