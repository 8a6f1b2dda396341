import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.zero_core.models.families import FAMILIES, VOCABULARY, build
from zero_core.models.attention import use_packed_attention
from zero_core.models.token_scores import TokenScorer, TokenScores

LENGTHS = (9, 5, 7)
SEQUENCES = [
    torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length))
    for length in LENGTHS
]
PIECE = 4 * 4 * VOCABULARY
"""Bytes of the logits of four targets."""


def packed_row() -> dict[str, Any]:
    starts = [0, LENGTHS[0], LENGTHS[0] + LENGTHS[1]]
    return {
        "input_ids": torch.cat(SEQUENCES)[None],
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None],
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool),
        "packed_lengths": LENGTHS,
        "positions": torch.cat(
            [start + torch.arange(n - 1) for start, n in zip(starts, LENGTHS, strict=True)]
        ),
        "targets": torch.cat([sequence[1:] for sequence in SEQUENCES]),
    }


def reference(family: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Each sequence alone, with whole logits and transformers' own eager attention."""
    model = build(family)
    model.set_attn_implementation("eager")
    logits = torch.cat([model(input_ids=sequence[None]).logits[0, :-1] for sequence in SEQUENCES])
    targets = packed_row()["targets"]
    log_probs = torch.log_softmax(logits.float(), -1).gather(1, targets[:, None])[:, 0]
    (-log_probs.mean()).backward()
    return log_probs.detach(), logits.argmax(-1) == targets, gradients(model)


def scored(family: str, logits_bytes: int) -> tuple[TokenScores, dict[str, Tensor]]:
    model = build(family)
    assert use_packed_attention(model)
    TokenScorer(model, logits_bytes)
    scores: TokenScores = model(**packed_row())
    (-scores.log_probs.mean()).backward()
    return scores, gradients(model)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("logits_bytes", [2**20, PIECE, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_in_pieces_is_each_sequence_alone_with_whole_logits(
    family: str, logits_bytes: int
) -> None:
    log_probs, correct, expected = reference(family)
    scores, found = scored(family, logits_bytes)
    torch.testing.assert_close(scores.log_probs, log_probs, rtol=1e-5, atol=1e-5)
    assert torch.equal(scores.correct, correct)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


class Largest(TorchDispatchMode):
    """Remembers the most elements that have the vocabulary as their last dimension, the weights aside."""

    def __init__(self, rows_of_weights: set[int]) -> None:
        super().__init__()
        self._weights = rows_of_weights
        self.rows = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[-1] == VOCABULARY:
                rows = leaf.numel() // VOCABULARY
                if rows not in self._weights:
                    self.rows = max(self.rows, rows)
        return result


def test_no_more_logits_are_there_at_once_than_was_said() -> None:
    model = build("llama")
    TokenScorer(model, PIECE)
    row = packed_row()
    use_packed_attention(model)
    with Largest({32}) as largest:
        model(**row).log_probs.sum().backward()
    assert 1 <= largest.rows <= 4
    whole = build("llama")
    TokenScorer(whole, 2**20)
    use_packed_attention(whole)
    with Largest({32}) as largest:
        whole(**row).log_probs.sum().backward()
    assert largest.rows == len(row["targets"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_summed_in_fp32(dtype: torch.dtype) -> None:
    model = build("llama").to(dtype)
    logits = copy.deepcopy(model)(input_ids=SEQUENCES[0][None]).logits[0, :-1]
    expected = torch.log_softmax(logits.float(), -1).gather(1, SEQUENCES[0][1:, None])[:, 0]
    TokenScorer(model, 2**20)
    positions = torch.arange(LENGTHS[0] - 1)
    scores = model(input_ids=SEQUENCES[0][None], positions=positions, targets=SEQUENCES[0][1:])
    torch.testing.assert_close(scores.log_probs, expected, rtol=1e-6, atol=1e-6)


def test_a_forward_without_targets_is_the_models_own() -> None:
    model, plain = build("llama"), build("llama")
    TokenScorer(model, 1)
    ids = SEQUENCES[0][None]
    assert torch.equal(model(input_ids=ids).logits, plain(input_ids=ids).logits)
    settings = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(model.generate(ids, **settings), plain.generate(ids, **settings))


@pytest.mark.parametrize("family", ["capped", "sinks", "window"])
def test_generation_with_the_packed_attention_is_the_eager_one(family: str) -> None:
    model, plain = build(family), build(family)
    assert use_packed_attention(model)
    plain.set_attn_implementation("eager")
    ids = torch.stack([SEQUENCES[0], torch.cat([torch.zeros(2, dtype=torch.int64), SEQUENCES[2]])])
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": mask}
    assert torch.equal(model.generate(ids, **settings), plain.generate(ids, **settings))
