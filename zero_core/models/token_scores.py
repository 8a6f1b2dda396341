"""Log-probabilities of target tokens, without the logits of all positions at once.

The logits of a long sequence with a large vocabulary are the largest tensor of a fine-tuning: 8,192 tokens
of 128,256 words take 4.2 GB in fp32. Here the model's last hidden states are projected for the targets alone,
and piece by piece where they are many: a piece keeps its hidden states and is projected again in backward.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

_BLOCK_BYTES = 2**22
"""Of logits worked on at a time: they and their exponentials stay in the cache."""


@dataclass(frozen=True)
class TokenScores:
    log_probs: Tensor
    """(targets,) fp32, differentiable: natural logarithm of each target's probability."""

    correct: Tensor
    """(targets,) bool: the target was the model's first choice."""


class TokenScorer:
    """Gives a causal language model's forward a second form, which answers with ``TokenScores``.

    With ``positions`` and ``targets`` (see ``data.batches.Batch``) among its arguments the model scores;
    without them it is what it was. It stays one forward of the whole model, so that hooks see it as such.
    """

    def __init__(self, model: PreTrainedModel, logits_bytes: int) -> None:
        self._model = model
        self._prefix = model.base_model_prefix
        self._whole: Callable[..., Any] = model.forward
        vocabulary: int = model.config.get_text_config().vocab_size
        self._piece = max(1, logits_bytes // (4 * vocabulary))
        """Targets whose logits are there at once."""

        @wraps(self._whole)
        def forward(
            *arguments: Any, positions: Tensor | None = None, targets: Tensor | None = None, **options: Any
        ) -> Any:
            if positions is None or targets is None:
                return self._whole(*arguments, **options)
            return self._scored(positions, targets, *arguments, **options)

        model.forward = forward

    def _scored(self, positions: Tensor, targets: Tensor, *arguments: Any, **options: Any) -> TokenScores:
        body: nn.Module = getattr(self._model, self._prefix)
        states: Tensor = body(*arguments, use_cache=False, **options)[0]
        states = states.reshape(-1, states.shape[-1])[positions]
        if len(targets) <= self._piece:
            return TokenScores(*self._score(states, targets))
        pieces = math.ceil(len(targets) / self._piece)
        scored = [
            checkpoint(self._score, some, theirs, use_reentrant=False, preserve_rng_state=False)
            for some, theirs in zip(states.tensor_split(pieces), targets.tensor_split(pieces), strict=True)
        ]
        log_probs, correct = zip(*scored, strict=True)
        return TokenScores(torch.cat(log_probs), torch.cat(correct))

    def _score(self, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self._logits(states)
        log_probs: Tensor
        log_probs, correct = _PickedLogProbs.apply(logits, targets)
        return log_probs, correct

    def _logits(self, states: Tensor) -> Tensor:
        """(n, vocabulary), of (n, width) hidden states: scaled or capped as the model's author has it.

        It is the model's own forward, its body replaced by one that returns the states.
        """
        modules = self._model._modules
        body = modules[self._prefix]
        modules[self._prefix] = _Given(states[None])
        try:
            logits: Tensor = self._whole(inputs_embeds=states[None], use_cache=False).logits[0]
        finally:
            modules[self._prefix] = body
        return logits


class _Given(nn.Module):
    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self._states = states

    def forward(self, *_: Any, **__: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self._states)


class _PickedLogProbs(torch.autograd.Function):
    """log softmax, of which one entry a row is taken; the gradient is written over the logits.

    Of n rows of V logits it needs n V elements once, in their own dtype, where ``cross_entropy`` has them two
    or three times in fp32. d log p[t] / d logits = onehot(t) - softmax.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = torch.empty(len(targets), dtype=torch.float32, device=logits.device)
        sums = torch.empty_like(log_probs)
        correct = torch.empty(len(targets), dtype=torch.bool, device=logits.device)
        for rows in _blocks(logits):
            block, theirs = logits[rows].float(), targets[rows]
            top, first = block.max(-1)
            sums[rows] = top + (block - top[:, None]).exp_().sum(-1).log_()
            log_probs[rows] = block.gather(1, theirs[:, None])[:, 0] - sums[rows]
            correct[rows] = first == theirs
        ctx.save_for_backward(logits, targets, sums)
        ctx.mark_non_differentiable(correct)
        return log_probs, correct

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logits, targets, sums = ctx.saved_tensors
        with torch.no_grad():
            for rows in _blocks(logits):
                weight = gradients[0][rows][:, None]
                block = (logits[rows].float() - sums[rows][:, None]).exp_().mul_(-weight)
                block.scatter_add_(1, targets[rows][:, None], weight)
                # A second backward through these logits is refused by autograd's version check.
                logits[rows] = block.to(logits.dtype)
        return logits, None


def _blocks(logits: Tensor) -> list[slice]:
    rows = max(1, _BLOCK_BYTES // (4 * logits.shape[1])) if logits.device.type == "cpu" else len(logits)
    return [slice(first, first + rows) for first in range(0, len(logits), rows)]
