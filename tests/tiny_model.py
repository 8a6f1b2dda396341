"""A model directory small enough for any test, and chat data that it can learn.

``python -m tests.tiny_model DIR [--chat-file FILE --examples N]`` does the same from a shell, for tests
whose own process must not load torch.
"""

import argparse
import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>")
MAX_LENGTH = 2048


def byte_tokenizer(chat_template: str | None = CHATML) -> "PreTrainedTokenizerFast":
    """One token a byte plus ChatML's two special tokens: nothing is unknown to it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = chat_template
    return wrapped


def write_tiny_model(
    path: Path, *, hidden: int = 32, layers: int = 2, heads: int = 2, tie: bool = True, seed: int = 0
) -> Path:
    """Write a Llama with random weights (about 50,000 parameters by default) and its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=6 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=tie,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def write_chat_file(path: Path, examples: int, seed: int = 0) -> Path:
    """Write additions as OpenAI chat JSONL; the same seed gives the same file."""
    draw = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(examples):
            left, right = draw.randrange(100), draw.randrange(100)
            answer = f"The sum is {left + right}" + draw.choice([".", ", as you can check.", "!"])
            messages = [
                {"role": "user", "content": f"What is {left} plus {right}?"},
                {"role": "assistant", "content": answer},
            ]
            if draw.random() < 0.25:
                messages.insert(0, {"role": "system", "content": "You add numbers."})
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chat-file", type=Path)
    parser.add_argument("--examples", type=int, default=32)
    options = parser.parse_args()
    write_tiny_model(options.directory, hidden=options.hidden, layers=options.layers, seed=options.seed)
    if options.chat_file is not None:
        write_chat_file(options.chat_file, options.examples, options.seed)


if __name__ == "__main__":
    main()
