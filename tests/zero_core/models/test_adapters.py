"""Adapters added in place: their initial values, where the base's come from, and switching them off."""

import math
from pathlib import Path

import peft
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.tiny_model import write_tiny_model
from tests.zero_core import lora_runs
from tests.zero_core.lora_runs import Plan
from tests.zero_core.ranks import RankPool
from tests.zero_core.reference import build_model
from zero_core.config.lora import LoraConfig
from zero_core.models.adapters import add_lora
from zero_core.models.loading import load_model, open_model

LORA = LoraConfig(r=4, alpha=16)
WHOLE = LoraConfig(r=4, target_modules=("q_proj",), modules_to_save=("lm_head", "input_layernorm"))


def values(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_the_model_stays_itself_and_computes_what_it_did() -> None:
    model = build_model(True)
    before = lora_runs.logits(model)
    kept = {id(parameter): parameter.detach().clone() for parameter in model.parameters()}
    state = torch.get_rng_state()
    adapters = add_lora(model, LORA, 7)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(lora_runs.logits(model), before)
    for name, parameter in model.named_parameters():
        if name in adapters.initial:
            assert parameter.requires_grad
            assert parameter.dtype == torch.float32
        else:
            assert not parameter.requires_grad
            assert torch.equal(parameter, kept[id(parameter)])


def test_initial_values_are_pefts_distribution_from_a_seed_of_their_name() -> None:
    model = build_model(True)
    adapters = add_lora(model, LORA, 7)
    drawn = []
    for name, value in values(model).items():
        if ".lora_B." in name:
            assert not value.any()
        elif ".lora_A." in name:
            bound = math.sqrt(6 / ((1 + 5) * value.shape[1]))
            assert 0.9 * bound < value.abs().max() <= bound
            drawn.append(value.flatten() / bound)
    together = torch.cat(drawn)
    assert len({tuple(value[:8].tolist()) for value in drawn}) == len(drawn)
    # Of the uniform distribution on [-1, 1], by its mean and variance.
    assert abs(together.mean()) < 4 / math.sqrt(3 * together.numel())
    assert together.var().item() == pytest.approx(1 / 3, rel=0.05)
    assert adapters.config.init_lora_weights is True


def test_they_depend_on_seed_and_name_alone() -> None:
    def added(seed: int, **fields: tuple[str, ...]) -> dict[str, Tensor]:
        model = build_model(True)
        adapters = add_lora(model, LoraConfig(r=4, **fields), seed)
        return {name: value for name, value in values(model).items() if name in adapters.initial}

    every = added(7)
    few = added(7, target_modules=("up_proj", "q_proj"))
    assert 0 < len(few) < len(every)
    assert all(torch.equal(every[name], value) for name, value in few.items())
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert not torch.equal(added(8)[name], every[name])


@pytest.mark.parametrize("lora", [LORA, WHOLE], ids=["adapters", "whole"])
@pytest.mark.parametrize("tie", [False, True])
def test_a_model_without_values_reads_what_a_loaded_one_has(
    tmp_path: Path, tie: bool, lora: LoraConfig
) -> None:
    path = write_tiny_model(tmp_path / "model", tie=tie)
    loaded, _ = load_model(path, torch.float32)
    add_lora(loaded, lora, 7)
    opened = open_model(path, torch.float32)
    empty = opened.model
    weights = add_lora(empty, lora, 7).weights(opened.weights)
    expected = values(loaded)
    names = [name for name, _ in empty.named_parameters()]
    assert names == list(expected)
    for name in names:
        value = expected[name].flatten()
        for start, length in ((0, len(value)), (1, len(value) - 2), (len(value) // 2, 1)):
            assert torch.equal(weights.read(name, start, length), value[start : start + length]), name


def test_trained_copies_start_from_the_base_and_stay_tied() -> None:
    model = build_model(True)
    base = model.lm_head.weight
    adapters = add_lora(model, WHOLE, 7)
    head, embedding = model.lm_head, model.model.embed_tokens
    assert head.original_module.weight is embedding.original_module.weight is base
    copied = head.modules_to_save["default"].weight
    assert copied is embedding.modules_to_save["default"].weight
    assert copied is not base
    assert copied.requires_grad
    assert torch.equal(copied, base)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == adapters.stored_keys.keys()


@pytest.mark.parametrize(("rslora", "scaling"), [(False, 16 / 4), (True, 16 / 2)])
def test_the_scaling_is_the_papers(rslora: bool, scaling: float) -> None:
    adapters = add_lora(build_model(True), LoraConfig(r=4, alpha=16, use_rslora=rslora), 7)
    assert {layer.scaling for layer in adapters.layers} == {scaling}
    assert adapters.config.use_rslora is rslora


def test_a_stored_config_is_one_that_peft_reads(tmp_path: Path) -> None:
    adapters = add_lora(build_model(True), LORA, 7)
    adapters.write_config(tmp_path, "org/model")
    read = peft.LoraConfig.from_pretrained(tmp_path)
    assert read.base_model_name_or_path == "org/model"
    assert read.peft_type == "LORA"
    assert read.task_type == "CAUSAL_LM"
    assert read.inference_mode
    assert (read.r, read.lora_alpha, read.bias, read.modules_to_save) == (4, 16, "none", None)
    assert {"q_proj", "down_proj"} < set(read.target_modules)


def off_and_on(directory: Path, plan: Plan, lora: LoraConfig) -> list[Tensor]:
    engine, adapters = lora_runs.build(directory, plan, lora)
    before = lora_runs.logits(engine)
    lora_runs.run_steps(engine, 2)
    trained = lora_runs.logits(engine)
    with adapters.off():
        base = lora_runs.logits(engine)
    again = lora_runs.logits(engine)
    # And training goes on.
    lora_runs.run_steps(engine, 3)
    further = lora_runs.logits(engine)
    engine.close()
    return [before, trained, base, again, further]


@pytest.mark.parametrize("stage", [0, 3])
def test_switched_off_it_is_the_base_model(pools: dict[int, RankPool], tmp_path: Path, stage: int) -> None:
    path = write_tiny_model(tmp_path / "model")
    lora = LoraConfig(r=4, modules_to_save=("lm_head",))
    for before, trained, base, again, further in pools[2].run(off_and_on, path, Plan(stage), lora):
        assert torch.equal(base, before)
        assert torch.equal(again, trained)
        assert (trained - base).abs().max() > 1e-3
        assert (further - again).abs().max() > 1e-3
