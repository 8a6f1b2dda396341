"""LoRA on the engine as ranks of the pool run it, and plain PyTorch with peft on the same batches."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from tests.zero_core.engine_runs import micro_batches
from tests.zero_core.token_loss import token_loss
from zero_core import AdamWConfig, LossScaleConfig, StepReport, ZeroConfig, ZeroEngine
from zero_core.checkpoints import checkpoint
from zero_core.checkpoints.masters import gather_masters
from zero_core.config.lora import LoraConfig
from zero_core.config.zero import Precision
from zero_core.models.adapters import Adapters, add_lora
from zero_core.models.loading import load_model, open_model
from zero_core.sharding.assembly import DTYPES

SEED = 7
STEPS = 10
OPTIMIZER = AdamWConfig(lr=3e-3, weight_decay=0.1)
LORA = LoraConfig(r=4, alpha=16)
PREFIX = "base_model.model."


@dataclass(frozen=True)
class Plan:
    stage: int
    precision: Precision = "fp32"
    on_meta: bool = False
    accumulation: int = 1


@dataclass
class Result:
    losses: list[float] = field(default_factory=list)
    reports: list[StepReport] = field(default_factory=list)
    adapter: dict[str, Tensor] = field(default_factory=dict)
    """Master weights."""


def global_batch(step: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 250, (12, 10), generator=torch.Generator().manual_seed(step))
    labels = ids.clone()
    labels[torch.arange(10)[None, :] < torch.arange(12)[:, None] % 8] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def build(directory: Path, plan: Plan, lora: LoraConfig) -> tuple[ZeroEngine, Adapters]:
    config = ZeroConfig(
        stage=plan.stage,
        precision=plan.precision,
        gradient_accumulation_steps=plan.accumulation,
        loss_scale=LossScaleConfig(initial_scale_power=8),
    )
    if plan.on_meta:
        opened = open_model(directory, DTYPES[plan.precision])
        adapters = add_lora(opened.model, lora, SEED)
        weights = adapters.weights(opened.weights)
        return ZeroEngine(opened.model, config, OPTIMIZER, weights=weights), adapters
    model, _ = load_model(directory, torch.float32)
    adapters = add_lora(model, lora, SEED)
    return ZeroEngine(model, config, OPTIMIZER), adapters


def run_steps(engine: ZeroEngine, last: int) -> Result:
    result = Result()
    for step in range(engine.steps, last):
        total = torch.zeros(1, dtype=torch.float64)
        report = None
        for micro_batch in micro_batches(global_batch(step), engine.config.gradient_accumulation_steps):
            loss = token_loss(engine, micro_batch)
            engine.backward(loss.mean, loss.tokens)
            report = engine.step()
            total += loss.total
        assert report is not None
        result.losses.append(engine.communicator.agree(total).item() / report.target_tokens)
        result.reports.append(report)
    for unit in engine.units:
        result.adapter |= {name: value.clone() for name, value in gather_masters(engine, unit).items()}
    return result


def train(directory: Path, plans: list[Plan], lora: LoraConfig, steps: int) -> list[Result]:
    results = []
    for plan in plans:
        engine, _ = build(directory, plan, lora)
        results.append(run_steps(engine, steps))
        engine.close()
    return results if dist.get_rank() == 0 else []


def save_after(directory: Path, plan: Plan, lora: LoraConfig, steps: int, path: Path) -> None:
    engine, _ = build(directory, plan, lora)
    run_steps(engine, steps)
    checkpoint.save(engine, path, {})
    engine.close()


def resume(directory: Path, plan: Plan, lora: LoraConfig, path: Path, last: int) -> Result:
    engine, _ = build(directory, plan, lora)
    checkpoint.load(engine, path)
    result = run_steps(engine, last)
    engine.close()
    return result


# Plain PyTorch.


def with_peft(directory: Path, config: peft.LoraConfig) -> PeftModel:
    base = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with quiet_peft():
        return peft.get_peft_model(base, config)


@contextmanager
def quiet_peft() -> Iterator[None]:
    """peft 0.21 reads a name that transformers 5.24 has replaced, and warns of what may become of ties."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        warnings.filterwarnings(
            "ignore", "Model has `tie_word_embeddings=True` and a tied layer", UserWarning
        )
        yield


@dataclass(frozen=True)
class Plain:
    losses: list[float]
    norms: list[float]
    adapter: dict[str, Tensor]
    moved: float
    """L2 norm of the way that the adapter went."""


@cache
def plain(directory: Path, precision: Precision, lora: LoraConfig = LORA) -> Plain:
    """One process: compute in ``precision``, fp32 masters of what is trained."""
    torch.set_num_threads(1)
    config = peft.LoraConfig(
        r=lora.r,
        lora_alpha=int(lora.alpha),
        target_modules="all-linear",
        modules_to_save=list(lora.modules_to_save) or None,
        use_rslora=lora.use_rslora,
    )
    model = with_peft(directory, config)
    start_alike(model, directory, lora)
    masters = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters() if p.requires_grad}
    start = {name: master.detach().clone() for name, master in masters.items()}
    model.to(DTYPES[precision])
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(masters.values(), lr=OPTIMIZER.lr, weight_decay=OPTIMIZER.weight_decay)
    losses, norms = [], []
    for step in range(STEPS):
        batch = global_batch(step)
        logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        # As the engine scales in fp16: neither changes a value that is in range.
        (loss * 256).backward()
        for name, master in masters.items():
            gradient = trained[name].grad
            assert gradient is not None
            master.grad, trained[name].grad = gradient.float() / 256, None
        norms.append(torch.nn.utils.clip_grad_norm_(masters.values(), float("inf")).item())
        optimizer.step()
        for name, master in masters.items():
            trained[name].data.copy_(master)
        losses.append(loss.item())
    adapter = {name.removeprefix(PREFIX): master.detach() for name, master in masters.items()}
    moved = sum(float((masters[n].detach() - start[n]).square().sum()) for n in start) ** 0.5
    return Plain(losses, norms, adapter, moved)


def start_alike(model: PeftModel, directory: Path, lora: LoraConfig) -> None:
    ours, _ = load_model(directory, torch.float32)
    add_lora(ours, lora, SEED)
    initial = dict(ours.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(initial[name.removeprefix(PREFIX)])


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return sum(float((ours[n] - theirs[n]).square().sum()) for n in theirs) ** 0.5


def logits(model: Any) -> Tensor:
    batch = global_batch(99)
    with torch.no_grad():
        answer: Tensor = model(batch["input_ids"] % 64, attention_mask=batch["attention_mask"]).logits
    return answer.float()
