"""A small Llama with a frozen base and adapters by peft: the engine's run, and plain PyTorch's.

The reference dequantizes the base with bitsandbytes and trains the adapters on that.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from tests.zero_core.engine_runs import micro_batches
from tests.zero_core.reference import build_model, global_batch, mean_loss
from tests.zero_core.token_loss import token_loss
from zero_core import AdamWConfig, StepReport, ZeroConfig, ZeroEngine
from zero_core.memory.ledger import Usage
from zero_core.planner.formulas import Storage

OPTIMIZER = AdamWConfig(lr=3e-3, weight_decay=0.1, eps=1e-3)
"""An epsilon at the gradients' size: else a gradient near zero makes a full step of its rounding error."""
PLAIN: Storage = "fp32"
LAYERS = 3
Values = dict[str, Tensor]


def build(stored: torch.dtype = torch.float32, tied: bool = False) -> LlamaForCausalLM:
    """The base in ``stored``, frozen; adapters on all linear layers but the output, in fp32."""
    model = build_model(tied, LAYERS).to(stored)
    torch.manual_seed(1)
    # Both matrices of an adapter random: with one of them zero, the other would hardly train.
    config = LoraConfig(r=4, lora_alpha=8, target_modules=r".*_proj", init_lora_weights=False)
    inject_adapter_in_model(config, model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def is_quantized(name: str) -> bool:
    return "_proj.base_layer.weight" in name


def dequantized_by_bitsandbytes(model: nn.Module, dtype: torch.dtype) -> Values:
    """The frozen parameters, linear layers' through 4 bits and back."""
    # Slow to import, and no rank needs it.
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    values = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            values[name] = parameter.detach().to(dtype)
            if is_quantized(name):
                # Flat: its kernel for the CPU takes a row shorter than a block for a block.
                flat = parameter.detach().view(-1)
                codes, state = quantize_4bit(flat, blocksize=64, quant_type="nf4", compress_statistics=False)
                state.dtype = dtype
                values[name] = dequantize_4bit(codes, state).view_as(parameter)
    return values


@cache
def plain(steps: int, quantized: bool, stored: torch.dtype = torch.float32, tied: bool = False) -> Values:
    """All parameters after so many steps in fp32."""
    torch.set_num_threads(1)
    model = build(stored, tied)
    if quantized:
        base = dequantized_by_bitsandbytes(model, torch.float32)
        for name, parameter in model.named_parameters():
            if name in base:
                parameter.data = base[name]
    model = model.float()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=OPTIMIZER.lr, weight_decay=OPTIMIZER.weight_decay, eps=OPTIMIZER.eps
    )
    for step in range(steps):
        mean_loss(model, global_batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@dataclass
class Run:
    values: Values = field(default_factory=dict)
    """Of all parameters after the last step, whole."""
    reports: list[StepReport] = field(default_factory=list)
    memory: Usage = field(default_factory=dict)
    """After the last step."""
    states: int = 0
    """Bytes of what this rank's optimizer has: momentum, variance, and a step count a piece."""
    trainable: int = 0
    frozen: dict[Storage, int] = field(default_factory=dict)
    """Elements by how they are kept, padding included."""
    table: int = 0
    """Elements of the frozen embedding, which no gradient passes, padding included."""
    evaluated: list[float] = field(default_factory=list)
    """Losses without gradients, before the first step and after the last."""


def train(
    config: ZeroConfig,
    steps: int,
    stored: torch.dtype = torch.float32,
    tied: bool = False,
    recompute: Literal["reentrant", "other"] | None = None,
) -> Run:
    model = build(stored, tied)
    if recompute is not None:
        model.activation_checkpointing_enable({"use_reentrant": recompute == "reentrant"})
        model.enable_input_require_grads()
    engine = ZeroEngine(model, config, OPTIMIZER)
    run = Run()
    model.eval()
    run.evaluated.append(_evaluated(engine))
    model.train()
    run_steps(engine, 0, steps, run)
    count(engine, run)
    run.memory = engine.memory()
    run.evaluated.append(_evaluated(engine))
    run.values = whole_values(engine)
    engine.close()
    return run


def _evaluated(engine: Any) -> float:
    with torch.no_grad():
        return mean_loss(engine, global_batch(99)).item()


def run_steps(engine: ZeroEngine, first: int, last: int, run: Run) -> None:
    for step in range(first, last):
        report = None
        for batch in micro_batches(global_batch(step), engine.config.gradient_accumulation_steps):
            loss = token_loss(engine, batch)
            engine.backward(loss.mean, loss.tokens)
            report = engine.step()
        assert report is not None
        run.reports.append(report)
        if step == first:
            engine.start_measuring()


def whole_values(engine: ZeroEngine) -> Values:
    with engine.full_parameters() as model:
        return {name: p.detach().clone() for name, p in model.named_parameters()}


def count(engine: ZeroEngine, run: Run) -> None:
    """Elements by how ``ZeroConfig`` says that they are kept."""
    run.trainable = engine.trainable_elements
    run.states = sum(8 * owned.piece.length + 4 for owned in engine.optimizer.owned())
    elements: dict[Storage, int] = defaultdict(int)
    quantization = engine.config.frozen_quantization
    for unit in engine.units:
        for flat in unit.flats:
            names = [slot.name for slot in flat.layout.slots]
            if not flat.trainable:
                quantized = quantization is not None and all(map(is_quantized, names))
                elements[quantization if quantized and quantization else PLAIN] += flat.layout.size
            if names == ["model.embed_tokens.weight"]:
                run.table = flat.layout.size
    run.frozen = dict(elements)
