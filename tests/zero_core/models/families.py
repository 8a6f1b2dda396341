"""Small random models of several families, each with something of its own between its body and its loss."""

from typing import Any

import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
)

VOCABULARY = 64
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SMALL = {key: value for key, value in _SIZES.items() if key != "num_key_value_heads"}

FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES)),
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=True)),
    "window": lambda: MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=4)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=1, eos_token_id=2,
        )
    ),
    "neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**_SMALL)),
    "capped": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **_SIZES, head_dim=8, final_logit_softcapping=2.0, attn_logit_softcapping=1.0, sliding_window=4
        )
    ),
    "scaled": lambda: CohereForCausalLM(CohereConfig(**_SIZES, logit_scale=0.3)),
    "experts": lambda: MixtralForCausalLM(MixtralConfig(**_SIZES, num_local_experts=4)),
    "sinks": lambda: GptOssForCausalLM(
        GptOssConfig(**_SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=4)
    ),
}  # fmt: skip
"""By what is special; each call makes the same weights."""


def recurrent() -> PreTrainedModel:
    """Mixes neighbours: its recurrence and its convolution run over the row."""
    config = {key: value for key, value in _SIZES.items() if key != "num_key_value_heads"}
    torch.manual_seed(0)
    return RecurrentGemmaForCausalLM(
        RecurrentGemmaConfig(**config, lru_width=32, attention_window_size=8, block_types=["recurrent"])
    )


def build(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = FAMILIES[family]()
    # Initial weights are so small that every token is as likely as any other.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5.0)
    return model
