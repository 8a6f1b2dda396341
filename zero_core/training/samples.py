"""What the model says to prompts of the validation set, between steps, on the sharded model."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from transformers import GenerationConfig, PreTrainedModel

from zero_core.data.dataset import Dataset
from zero_core.data.tokenize import TokenizedExample
from zero_core.engine import ZeroEngine
from zero_core.models.generate import ends

LONGEST_TEXT = 4_000
"""Characters of a prompt or an answer that are told."""


@dataclass(frozen=True)
class Prompt:
    ids: NDArray[np.int32]
    reference: NDArray[np.int32]
    """What the validation set has there."""


@dataclass(frozen=True)
class Said:
    prompt: str
    """Its end, where the question stands."""
    answer: str
    reference: str


def prompts(dataset: Dataset, count: int, longest_answer: int) -> list[Prompt]:
    """Of the first ``count`` samples: all before the last part that is to be learnt.

    Raw text has nothing before: its first quarter is the prompt.
    """
    chosen = [dataset[index][0] for index in range(min(count, len(dataset)))]
    found = []
    for sequence in chosen:
        start = _start_of_last_part(sequence) or max(1, len(sequence) // 4)
        found.append(Prompt(sequence.input_ids[:start], sequence.input_ids[start:][:longest_answer]))
    return found


def _start_of_last_part(sequence: TokenizedExample) -> int:
    """0 where the part begins at the first token, or right after a lone begin token."""
    mask = sequence.target_mask
    last = int(np.flatnonzero(mask)[-1])
    outside = np.flatnonzero(~mask[:last])
    start = int(outside[-1]) + 1 if len(outside) else 0
    return start if start > 1 else 0


def answer(
    engine: ZeroEngine, model: PreTrainedModel, tokenizer: Any, asked: list[Prompt], longest_answer: int
) -> list[Said]:
    """Greedy answers. Collective: every rank answers all, each with the part of the model that it has."""
    length = max(len(prompt.ids) for prompt in asked)
    input_ids = torch.full((len(asked), length), tokenizer.pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(asked):
        input_ids[row, length - len(prompt.ids) :] = torch.from_numpy(prompt.ids.astype(np.int64))
        attention_mask[row, length - len(prompt.ids) :] = 1
    configured = GenerationConfig(
        max_new_tokens=longest_answer,
        do_sample=False,
        use_cache=True,
        eos_token_id=ends(model, tokenizer),
        pad_token_id=tokenizer.pad_token_id,
    )
    model.eval()
    try:
        with torch.no_grad():
            generate: Any = model.generate
            tokens = generate(
                input_ids=input_ids.to(engine.device),
                attention_mask=attention_mask.to(engine.device),
                generation_config=configured,
                # A rank that is done goes on as long as another is not, and takes part in its gathers.
                synced_gpus=dist.is_initialized() and dist.get_world_size() > 1,
            )
    finally:
        model.train()

    def text(ids: Any) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()

    return [
        Said(
            prompt=text(prompt.ids)[-LONGEST_TEXT:],
            answer=text(tokens[row, length:])[:LONGEST_TEXT],
            reference=text(prompt.reference)[:LONGEST_TEXT],
        )
        for row, prompt in enumerate(asked)
    ]
