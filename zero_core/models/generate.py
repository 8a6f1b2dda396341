"""``python -m zero_core.models.generate MODEL_DIR --prompt TEXT``: greedy answers to chat prompts, as JSON.

Prints ``[{"prompt": ..., "answer": ...}, ...]``. ``--check`` only loads the model.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from zero_core.models.loading import load_model
from zero_core.models.model_files import InvalidModel


def answer(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, max_new_tokens: int
) -> str:
    """The assistant's answer to one user message."""
    encoded: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt"
    )
    generate: Any = model.generate
    tokens = generate(
        **encoded,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        use_cache=True,
        eos_token_id=ends(model, tokenizer),
        pad_token_id=tokenizer.pad_token_id,
    )
    written = tokens[0, encoded["input_ids"].shape[1] :]
    return str(tokenizer.decode(written, skip_special_tokens=True)).strip()


def ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The model's own ends and the tokenizer's, which differ in some models."""
    configured: Any = model.generation_config.eos_token_id if model.generation_config else None
    ends = configured if isinstance(configured, list) else [configured]
    return sorted({int(end) for end in [*ends, tokenizer.eos_token_id] if end is not None})


def main() -> int:
    parser = argparse.ArgumentParser(description="Greedy answers of a chat model, as JSON.")
    parser.add_argument("model", type=Path, help="a Hugging Face directory with safetensors")
    parser.add_argument("--prompt", action="append", default=[], help="a user message; may be repeated")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--check", action="store_true", help="load the model, and nothing else")
    options = parser.parse_args()
    if not options.check and not options.prompt:
        parser.error("give --prompt or --check")
    if options.max_new_tokens < 1:
        parser.error("--max-new-tokens must be at least 1")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model, tokenizer = load_model(options.model, torch.float32)
    except InvalidModel as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    model.eval()
    answers = [
        {"prompt": prompt, "answer": answer(model, tokenizer, prompt, options.max_new_tokens)}
        for prompt in options.prompt
        if not options.check
    ]
    print(json.dumps(answers, ensure_ascii=False, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
