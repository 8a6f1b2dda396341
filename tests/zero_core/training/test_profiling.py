"""A profile against the bytes that torch's own allocator reports of a real forward and backward."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, T5Config, T5ForConditionalGeneration

from tests.zero_core.models.families import VOCABULARY, build
from zero_core import TrainConfig
from zero_core.config.lora import LoraConfig
from zero_core.models.adapters import add_lora
from zero_core.models.attention import use_packed_attention
from zero_core.planner.profile import ModelProfile
from zero_core.training.profiling import Case, Inputs, Subject, profile
from zero_core.training.recording import scored

CPU = torch.device("cpu")
TARGETS = 500
"""In two pieces of the logits."""


class Fp32:
    def read(self, name: str, start: int, length: int) -> Tensor:
        raise AssertionError("no values are needed")

    def stored_dtype(self, name: str) -> torch.dtype:
        return torch.float32


def causal(family: str, lora: bool = False) -> Subject:
    model = build(family)
    if lora:
        add_lora(model, LoraConfig(r=4), 0)
    return scored(model.train(), Fp32())


def profiled(subject: Subject) -> ModelProfile:
    return profile("a model", subject, TrainConfig(), "fp32", CPU, 256)


def allocated_peak(subject: Subject, case: Case, *, checkpointed: bool) -> int:
    """Of all that torch's CPU allocator gives out, workspace of kernels included."""
    model = subject.model
    if case.packed:
        assert use_packed_attention(model)
    if checkpointed:
        model.activation_checkpointing_enable()
    subject.prepare(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    subject.loss(model, real_inputs(subject, case)).backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as run:
        inputs = real_inputs(subject, case)
        subject.loss(model, inputs).backward()
    events: Any = run.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    live = peak = 0
    for _, nbytes in sorted(changes, key=lambda change: change[0]):
        live += nbytes
        peak = max(peak, live)
    return peak


def real_inputs(subject: Subject, case: Case) -> Inputs:
    inputs = subject.inputs(case)
    for name in inputs.keys() & {"input_ids", "targets", "positions"}:
        inputs[name].random_(0, VOCABULARY)
    if "position_ids" in inputs:
        inputs["position_ids"] = torch.cat([torch.arange(length) for length in case.lengths])[None]
    elif "attention_mask" in inputs:
        inputs["attention_mask"][:] = 1
        inputs["attention_mask"][0, -1] = 0
    return inputs


def assert_close(subject: Callable[[], Subject], cases: Sequence[Case]) -> None:
    recorded = profiled(subject())
    for case in cases:
        for checkpointed in (False, True):
            expected = recorded.timeline(packed=case.packed, checkpointed=checkpointed).peak(case.shape)
            assert expected == pytest.approx(
                allocated_peak(subject(), case, checkpointed=checkpointed), rel=0.02
            ), (case, checkpointed)


@pytest.mark.parametrize("family", ["llama", "gpt2", "capped", "experts"])
def test_the_peak_at_another_shape_is_what_the_allocator_gives_out(family: str) -> None:
    padded = Case((300,) * 4 if family != "gpt2" else (60,) * 20, False, TARGETS, TARGETS // 2)
    packed = Case((500, 100, 300, 130), True, TARGETS, TARGETS // 2)
    assert_close(lambda: causal(family), [padded, packed] if family == "llama" else [padded])
