"""peft 2500 and 2916: adapters on a sharded model see whole shapes, and train as in plain PyTorch."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from tests.zero_core.engine_runs import micro_batches
from tests.zero_core.hard_models import module_of
from tests.zero_core.lora_runs import quiet_peft
from tests.zero_core.ranks import RankPool
from tests.zero_core.reference import build_model, global_batch, mean_loss
from tests.zero_core.token_loss import token_loss
from zero_core import OptimizerConfig, ZeroConfig, ZeroEngine

STAGES = [0, 1, 2, 3]
STEPS = 4
OPTIMIZER = OptimizerConfig("SGD", lr=4.0, options={"momentum": 0.9})


def build() -> PeftModel:
    model = build_model(tied=True)
    torch.manual_seed(1)
    targets = ["q_proj", "down_proj"]
    # Both matrices of an adapter random: with one of them zero, the other would hardly train.
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    with quiet_peft():
        return get_peft_model(model, config)


@cache
def plain() -> PeftModel:
    torch.set_num_threads(1)
    model = build()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=OPTIMIZER.lr, **OPTIMIZER.options)
    for step in range(STEPS):
        mean_loss(model, global_batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def logits(model: Any) -> Tensor:
    batch = global_batch(99)
    module_of(model).eval()
    with torch.no_grad():
        return model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits.clone()


def base_weights(model: PeftModel) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if "base_layer" in name}


def trained(stage: int) -> dict[str, Any]:
    model = build()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    engine = ZeroEngine(model, ZeroConfig(stage=stage), OPTIMIZER)
    kept = {name: tuple(p.shape) for name, p in model.named_parameters()}
    for step in range(STEPS):
        (batch,) = micro_batches(global_batch(step), 1)
        loss = token_loss(engine, batch)
        engine.backward(loss.mean, loss.tokens)
        engine.step()
    usage = engine.memory()
    with engine.full_parameters():
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.merge_adapter()
        merged = logits(model), base_weights(model)
        model.unmerge_adapter()
    answer = {
        "shapes": shapes == kept,
        "trainable": model.get_nb_trainable_parameters(),
        "weights": weights,
        "merged": merged,
        "unmerged": logits(engine),
        "psi": engine.trainable_elements,
        "held": {name: usage[name]["current"]["device"] for name in ("parameters", "gradients", "optimizer")},
        "peak": usage["gradients"]["peak"]["device"],
        "elements": sum(flat.layout.size for unit in engine.units for flat in unit.flats),
    }
    engine.close()
    return answer


@dataclass(frozen=True)
class Run:
    stage: int
    answers: list[dict[str, Any]]


@pytest.fixture(scope="module", params=STAGES)
def run(pools: dict[int, RankPool], request: pytest.FixtureRequest) -> Run:
    return Run(request.param, pools[2].run(trained, request.param))


def test_shapes_are_whole_and_adapters_train_as_in_plain_pytorch(run: Run) -> None:
    model, base = plain(), dict(build().named_parameters())
    for answer in run.answers:
        assert answer["shapes"]
        assert answer["trainable"] == model.get_nb_trainable_parameters()
        for name, expected in model.named_parameters():
            if expected.requires_grad:
                assert (expected - base[name]).abs().max() > 1e-3
                torch.testing.assert_close(answer["weights"][name], expected.detach(), rtol=1e-4, atol=1e-6)
            else:
                assert torch.equal(answer["weights"][name], base[name]), name


def test_the_frozen_base_holds_its_parameters_and_nothing_more(run: Run) -> None:
    trainable, _ = plain().get_nb_trainable_parameters()
    # Momentum alone: of every trained element once, or once on each rank.
    momentum = sum(answer["held"]["optimizer"] for answer in run.answers)
    assert momentum == 4 * trainable * (2 if run.stage == 0 else 1)
    for answer in run.answers:
        assert answer["held"]["parameters"] == 4 * answer["elements"] // (2 if run.stage == 3 else 1)
        assert answer["psi"] < answer["elements"] / 4
        assert answer["held"]["gradients"] == 0
        assert 4 * trainable / 2 < answer["peak"] <= 4 * 2 * answer["psi"]


def test_merging_with_full_parameters_is_plain_pefts(run: Run) -> None:
    model = plain()
    unmerged = logits(model)
    base = base_weights(model)
    model.merge_adapter()
    merged = logits(model), base_weights(model)
    model.unmerge_adapter()
    assert min(float((merged[1][name] - base[name]).abs().max()) for name in base) > 1e-2
    for answer in run.answers:
        torch.testing.assert_close(answer["merged"], merged, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(answer["unmerged"], unmerged, rtol=1e-4, atol=1e-5)
