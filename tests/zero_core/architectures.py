"""Small causal language models of the kinds that are stored otherwise than they are built."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    HrmTextConfig,
    Inkling2TextConfig,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from tests.tiny_model import byte_tokenizer

_SIZES: dict[str, Any] = {
    "vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_INKLING = _GROUPED | {
    "vocab_size": 272, "unpadded_vocab_size": 258, "head_dim": 8, "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window_size": 16, "d_rel": 4, "rel_extent": 16,
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
}  # fmt: skip
_DEEPSEEK = _SIZES | {
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
_GPT2: dict[str, Any] = {
    "vocab_size": 258, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0,
    "eos_token_id": 1,
}  # fmt: skip
_HEADS = _GROUPED | {"head_dim": 8}
_QWEN3 = _HEADS | {"num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2}

ARCHITECTURES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**_GROUPED),
    "llama-tied": LlamaConfig(**_GROUPED, tie_word_embeddings=True),
    "gpt2-tied": GPT2Config(**_GPT2),
    "gpt2": GPT2Config(**_GPT2, tie_word_embeddings=False),
    # Stored as embed_out.
    "gpt-neox": GPTNeoXConfig(**_SIZES),
    "gpt-neox-tied": GPTNeoXConfig(**_SIZES, tie_word_embeddings=True),
    # Experts stored one by one, gate and up projections apart.
    "mixtral": MixtralConfig(**_GROUPED, num_local_experts=4),
    "mixtral-tied": MixtralConfig(**_GROUPED, num_local_experts=4, tie_word_embeddings=True),
    "qwen3-moe": Qwen3MoeConfig(**_QWEN3),
    # A persistent buffer: the router's bias.
    "deepseek-v3": DeepseekV3Config(**_DEEPSEEK),
    # Buffers that are not stored: the embedding's scale, two rotary tables.
    "gemma2": Gemma2Config(**_HEADS),
    "gemma3-untied": Gemma3TextConfig(**_HEADS, tie_word_embeddings=False),
    # One stored matrix for several projections.
    "hrm": HrmTextConfig(**_SIZES | {"head_dim": 8}),
    # Interleaved rows, and a vocabulary stored with rows that the model leaves out.
    "inkling2": Inkling2TextConfig(**_INKLING),
}


def write_architecture(path: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    """A model with random weights in several files, and its tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(ARCHITECTURES[name])
        stored = model.state_dict()
        for tensor in stored.values():
            if tensor.is_floating_point():
                tensor.normal_(std=0.1)
    model.to(dtype).save_pretrained(path, max_shard_size="60KB")
    byte_tokenizer().save_pretrained(path)
    return path
