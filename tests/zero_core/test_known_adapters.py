"""peft 2500 and 2916: adapters on a sharded model see whole shapes, and train as in plain PyTorch."""

import warnings
from functools import cache
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor

from tests.zero_core.ranks import RankPool
from tests.zero_core.reference import build_model, global_batch, mean_loss, relative_difference
from tests.zero_core.training import micro_batches
from zero_core import OptimizerConfig, ZeroConfig, ZeroEngine
from zero_core.loss import token_loss

STAGES = [0, 1, 2, 3]
STEPS = 4
OPTIMIZER = OptimizerConfig("SGD", lr=2.0)
RANK = 4


def build() -> PeftModel:
    model = build_model(tied=True)
    torch.manual_seed(1)
    config = LoraConfig(r=RANK, lora_alpha=16, lora_dropout=0.0, target_modules=["q_proj", "down_proj"])
    with warnings.catch_warnings():
        # peft 0.21 still reads a name that transformers 5.24 has replaced.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        return get_peft_model(model, config)  # type: ignore[return-value]


@cache
def plain() -> PeftModel:
    torch.set_num_threads(1)
    model = build()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trainable, lr=OPTIMIZER.lr)
    for step in range(STEPS):
        mean_loss(model, global_batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def logits(model: Any) -> Tensor:
    batch = global_batch(99)
    model.eval()
    with torch.no_grad():
        return model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits.clone()  # type: ignore[no-any-return]


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
        merged = logits(model)
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
    engine.model.train()
    engine.close()
    return answer


@pytest.mark.parametrize("stage", STAGES)
def test_adapters_train_as_in_plain_pytorch_and_the_base_holds_nothing_more(
    pools: dict[int, RankPool], stage: int
) -> None:
    model = plain()
    expected = {name: p.detach() for name, p in model.named_parameters()}
    base = dict(build().named_parameters())
    adapters = {name for name, p in expected.items() if p.requires_grad}
    assert relative_difference({n: expected[n] for n in adapters}, {n: base[n] for n in adapters}) > 1e-2
    for answer in pools[2].run(trained, stage):
        assert answer["shapes"]
        assert answer["trainable"] == model.get_nb_trainable_parameters()
        for name, weight in answer["weights"].items():
            if name in adapters:
                torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-6)
            else:
                assert torch.equal(weight, base[name]), name
        parts = 2 if stage == 3 else 1
        assert answer["held"]["parameters"] == 4 * answer["elements"] // parts
        assert answer["held"]["optimizer"] == 0
        assert 0 < answer["peak"] <= 4 * 2 * answer["psi"]


@pytest.mark.parametrize("stage", STAGES)
def test_merging_with_full_parameters_is_plain_pefts(pools: dict[int, RankPool], stage: int) -> None:
    model = plain()
    unmerged = logits(model)
    model.merge_adapter()
    merged = logits(model)
    model.unmerge_adapter()
    for answer in pools[2].run(trained, stage):
        torch.testing.assert_close(answer["merged"], merged, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(answer["unmerged"], unmerged, rtol=1e-4, atol=1e-5)
