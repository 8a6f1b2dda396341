"""Which layers a LoRA job adapts and what it says of the choice."""

import pytest
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM, PreTrainedModel

from tests.zero_core.reference import build_model
from zero_core.config.lora import LoraConfig
from zero_core.models.adapter_targets import Targets, find_targets

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}


def gpt2() -> PreTrainedModel:
    sizes = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))


def mixtral() -> PreTrainedModel:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, bos_token_id=None, eos_token_id=None))


def targets(model: PreTrainedModel, **fields: tuple[str, ...]) -> Targets:
    return find_targets(model, LoraConfig(**fields))


@pytest.mark.parametrize("tied", [False, True])
def test_all_linear_is_every_linear_layer_but_the_output_layer(tied: bool) -> None:
    model = build_model(tied)
    found = targets(model)
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert set(found.layers) == linear - {"lm_head"}
    assert set(found.endings) == ATTENTION | MLP
    assert not found.whole
    assert not found.transposed
    assert not found.notes


def test_gpt2s_layers_are_linear_and_transposed() -> None:
    found = targets(gpt2())
    assert set(found.endings) == {"c_attn", "c_proj", "c_fc"}
    assert len(found.layers) == 2 * 4
    assert found.transposed


def test_fused_experts_are_left_alone_and_said_so() -> None:
    found = targets(mixtral())
    assert set(found.endings) == ATTENTION
    assert len(found.notes) == 1
    assert "(down_proj, gate_up_proj) are left alone" in found.notes[0]
    # Who names layers knows which.
    assert not targets(mixtral(), target_modules=("q_proj",)).notes


def test_endings_match_the_chosen_layers_and_no_others() -> None:
    found = targets(build_model(True), exclude_modules=("layers.1.mlp",))
    # Layer 0's gate_proj is adapted and layer 1's is not: the ending alone would be wrong.
    assert set(found.endings) == set(found.layers)
    assert "model.layers.0.mlp.gate_proj" in found.layers
    assert "model.layers.1.mlp.gate_proj" not in found.layers
    assert "model.layers.1.self_attn.q_proj" in found.layers


def test_names_are_endings_of_whole_words() -> None:
    found = targets(build_model(True), target_modules=("q_proj", "layers.1.mlp.up_proj"))
    assert found.layers == (
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.q_proj",
        "model.layers.1.mlp.up_proj",
    )
    with pytest.raises(ValueError, match="'proj' is no linear layer"):
        targets(build_model(True), target_modules=("proj",))


def test_the_output_layer_is_adapted_when_it_is_named() -> None:
    assert targets(build_model(False), target_modules=("lm_head",)).layers == ("lm_head",)


def test_what_is_trained_whole_is_not_adapted_too() -> None:
    found = targets(build_model(False), modules_to_save=("down_proj", "norm"))
    assert set(found.endings) == ATTENTION | MLP - {"down_proj"}
    assert found.whole == ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj", "model.norm")


@pytest.mark.parametrize("named", ["lm_head", "embed_tokens"])
def test_modules_that_share_a_weight_are_trained_together(named: str) -> None:
    found = targets(build_model(True), modules_to_save=(named,))
    assert found.whole == ("model.embed_tokens", "lm_head")
    assert len(found.notes) == 1
    assert "it is trained as one and stays shared" in found.notes[0]
    assert len(targets(build_model(False), modules_to_save=(named,)).whole) == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"target_modules": ("qproj",)}, r"lora\.target_modules: 'qproj' is no linear layer .* q_proj"),
        ({"target_modules": ("embed_tokens",)}, r"lora\.target_modules: 'embed_tokens' is no linear layer"),
        ({"exclude_modules": ("qproj",)}, r"lora\.exclude_modules: 'qproj' is no module .* q_proj"),
        ({"modules_to_save": ("head",)}, r"lora\.modules_to_save: 'head' is no module .* lm_head"),
        ({"exclude_modules": ("layers",)}, r"lora\.target_modules: no layer is left to adapt"),
        (
            {"target_modules": ("q_proj",), "modules_to_save": ("self_attn",)},
            r"lora\.target_modules: no layer is left to adapt",
        ),
    ],
)
def test_a_name_that_matches_nothing_is_refused_with_what_there_is(
    fields: dict[str, tuple[str, ...]], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        targets(build_model(True), **fields)
