"""A model's profile, from forwards and backwards on fake tensors: nothing is computed, and no memory needed.

Only shapes, dtypes and the kernels that are chosen matter for what is alive when. A few shapes of a
micro-batch are tried, padded and packed, with and without activation checkpointing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from zero_core.config.train import TrainConfig
from zero_core.config.zero import Precision
from zero_core.models.attention import use_packed_attention
from zero_core.models.fake_model import fake_copy
from zero_core.models.polynomials import fit_kept, fit_timeline
from zero_core.models.traces import Trace, trace
from zero_core.planner.profile import (
    BatchShape,
    Bytes,
    ModelProfile,
    ParameterProfile,
    Timeline,
    UnitProfile,
    lora_shape,
)
from zero_core.sharding.assembly import DTYPES
from zero_core.sharding.partition import Part, partition

PIECE = 256
"""Most targets whose logits are there at once while recording."""

_TARGETS = ((2 * PIECE, PIECE), (2 * PIECE - 1, PIECE), (2 * PIECE - 2, PIECE - 1))
"""Of a micro-batch, and of these at once: always two pieces of nearly one size, so that it is one program."""

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A micro-batch to be tried."""

    lengths: tuple[int, ...]
    """Of its sequences; padded they are of one length."""

    packed: bool
    targets: int
    targets_at_once: int

    @property
    def shape(self) -> BatchShape:
        if self.packed:
            return BatchShape.packed(self.lengths, self.targets, self.targets_at_once)
        rows, length = len(self.lengths), self.lengths[0]
        return BatchShape.padded(rows, length, self.targets, self.targets_at_once)


@dataclass(frozen=True)
class Subject:
    """A model and how it is trained."""

    model: PreTrainedModel
    """In training mode; it stays as it is."""

    prepare: Callable[[PreTrainedModel], None]
    """What becomes of a copy of it before it runs."""

    inputs: Callable[[Case], Inputs]
    """Tensors of the shapes and dtypes that a micro-batch has."""

    loss: Callable[[PreTrainedModel, Inputs], Tensor]
    """A scalar, whatever its values."""

    stored_dtype: Callable[[str], torch.dtype]
    """Of a parameter, where its values come from."""

    takes_packed: bool
    """``inputs`` knows how to pack."""


def profile(
    name: str, subject: Subject, train: TrainConfig, precision: Precision, device: torch.device, length: int
) -> ModelProfile:
    """``length`` is the longest sequence that is tried. ``device`` says whose kernels are asked; "cuda" needs
    a torch that has them, and no GPU's memory."""
    timelines: list[Timeline] = []
    kept: list[dict[str, Bytes]] = []
    for packed, checkpointed in product((False, True), (False, True)):
        cases = packed_cases(length) if packed else padded_cases(length)
        with fake_copy(subject.model, DTYPES[precision], device) as model:
            if packed and not (subject.takes_packed and use_packed_attention(model)):
                break
            if checkpointed:
                model.activation_checkpointing_enable()
            subject.prepare(model)
            traces = [_trace(subject, model, case, device) for case in cases]
        shapes = [case.shape for case in cases]
        timelines.append(fit_timeline(shapes, traces, packed=packed, checkpointed=checkpointed))
        if not packed:
            kept.append(fit_kept(shapes, traces))
    text = subject.model.config.get_text_config()
    return ModelProfile(
        model=name,
        method=train.method,
        lora=lora_shape(train),
        precision=precision,
        device=device.type,
        vocabulary=text.vocab_size,
        hidden=text.hidden_size,
        buffer_bytes=sum(buffer.nbytes for buffer in subject.model.buffers()),
        units=_units(subject, kept),
        timelines=tuple(timelines),
    )


def padded_cases(length: int) -> list[Case]:
    """As many as there are figures to a ``BatchShape``, and one for the constant. A single row is left out:
    what is expanded over the rows is then copied for nobody, which makes it another program."""
    half, quarter = length // 2, length // 4
    sizes = (
        (2, length), (3, length), (2, half), (4, half), (2, quarter), (5, quarter), (2, 3 * quarter),
        (3, 3 * quarter),
    )  # fmt: skip
    return [Case((each,) * rows, False, *_TARGETS[index % 3]) for index, (rows, each) in enumerate(sizes)]


def packed_cases(length: int) -> list[Case]:
    """Of as many sequences each, since attention goes through them one by one; the first is the longest."""
    half, quarter = length // 2, length // 4
    sizes = (
        (length, length), (length, half), (half, half), (half, quarter), (length, quarter),
        (3 * quarter, quarter), (3 * quarter, half), (3 * quarter, 3 * quarter),
    )  # fmt: skip
    return [Case(each, True, *_TARGETS[index % 3]) for index, each in enumerate(sizes)]


def _trace(subject: Subject, model: PreTrainedModel, case: Case, device: torch.device) -> Trace:
    def inputs() -> Inputs:
        made = subject.inputs(case)
        return {name: v.to(device) if isinstance(v, Tensor) else v for name, v in made.items()}

    return trace(model, partition(model), inputs, partial(subject.loss, model))


def _units(subject: Subject, kept: Sequence[dict[str, Bytes]]) -> tuple[UnitProfile, ...]:
    names: dict[int, list[str]] = {}
    for name, parameter in subject.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    plain, checkpointed = kept
    nothing = Bytes()
    return tuple(
        UnitProfile(
            part.name,
            _parameters(part, names, subject.stored_dtype),
            plain.get(part.name, nothing),
            checkpointed.get(part.name, nothing),
        )
        for part in partition(subject.model)
    )


def _parameters(
    part: Part, names: dict[int, list[str]], stored_dtype: Callable[[str], torch.dtype]
) -> tuple[ParameterProfile, ...]:
    return tuple(
        ParameterProfile(
            name=name,
            shape=tuple(parameter.shape),
            stored_dtype=str(stored_dtype(name)).removeprefix("torch."),
            trainable=parameter.requires_grad,
            linear=name in part.linear_weights,
            tied=tuple(other for other in names[id(parameter)] if other != name),
        )
        for name, parameter in part.parameters
    )
