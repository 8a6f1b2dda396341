"""Attention over sequences that lie end to end in one row, each of which sees itself alone.

The lengths come as the keyword ``packed_lengths`` of the model's forward, which models hand down to their
attention. Without it, in generation for example, attention is over the whole row, as the mask says.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "shardyard"
"""Of this attention, in transformers' registry."""

_KINDS = {"full_attention", "sliding_attention"}


def use_packed_attention(model: PreTrainedModel) -> bool:
    """Let ``model`` take packed rows. False, and nothing changes, where its attention is of another kind."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not getattr(model, "_supports_attention_backend", False) or not kinds <= _KINDS:
        return False
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    return True


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed_lengths: tuple[int, ...] | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """``query`` (rows, heads, tokens, width), ``key`` and ``value`` (rows, key heads, tokens, width).

    Packed, there is one row. The answer is (rows, tokens, heads, width). ``softcap`` is Gemma 2's limit of
    the scores, ``s_aux`` gpt-oss's score a head that takes its share and adds nothing.
    """
    special = softcap is not None or s_aux is not None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if packed_lengths is None:
        if special:
            mask = _sight(query, key, None) if attention_mask is None else attention_mask
            return _explicit(query, key, value, mask, scale, softcap, s_aux).transpose(1, 2), None
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return output
    grouped = query.shape[1] != key.shape[1]
    outputs = []
    for q, k, v in zip(*(tensor.split(packed_lengths, dim=2) for tensor in (query, key, value)), strict=True):
        if special:
            outputs.append(_explicit(q, k, v, _sight(q, k, sliding_window), scale, softcap, s_aux))
            continue
        narrow = sliding_window is not None and q.shape[2] > sliding_window
        seen = _sight(q, k, sliding_window) if narrow else None
        outputs.append(
            scaled_dot_product_attention(
                q, k, v, attn_mask=seen, scale=scale, is_causal=seen is None, enable_gqa=grouped
            )
        )
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _sight(query: Tensor, key: Tensor, width: int | None) -> Tensor:
    """(queries, keys), bool: which keys each query sees. The last query is the last key's."""
    keys = torch.arange(key.shape[2], device=query.device)
    distance = keys[-query.shape[2] :, None] - keys[None, :]
    seen = distance >= 0
    return seen if width is None else seen & (distance < width)


def _explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """softmax(q k^T) v with the scores at hand: what no fused kernel does. (rows, heads, tokens, width)."""
    groups = query.shape[1] // key.shape[1]
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    scores = (query @ key.transpose(2, 3)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    else:
        scores = scores + mask
    if sinks is not None:
        beside = sinks.reshape(1, -1, 1, 1).expand(len(scores), -1, scores.shape[2], 1).to(scores.dtype)
        scores = torch.cat([scores, beside], dim=-1)
    shares = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    return shares[..., : key.shape[2]] @ value
