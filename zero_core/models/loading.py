"""Models and tokenizers from local directories: safetensors only, no code of theirs, no network."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from zero_core.models.model_files import InvalidModel, check_model_dir

DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""For a model without a template: ChatML, with the model's own end-of-sequence token after each turn."""

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def load_model(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model on the CPU, ready to train, and its tokenizer with an end, a padding and a chat template.

    Raises InvalidModel, which names the directory.
    """
    check_model_dir(path)
    tokenizer = load_tokenizer(path)
    try:
        config = AutoConfig.from_pretrained(path, **_LOCAL)
        switch_off_dropout(config)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            attn_implementation="sdpa",
            # Not to ignore them: so that they are listed in the info, and refused below.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **_LOCAL,
        )
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise InvalidModel(f"{path} can't be loaded: {error}") from error
    model, info = loaded
    _refuse_incomplete(path, info)
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise InvalidModel(f"{path}: the tokenizer has {len(tokenizer)} tokens, the embedding {rows} rows")
    switch_off_dropout(model)
    # The cache serves generation alone, which asks for it itself.
    model.config.use_cache = False
    return model, tokenizer


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """A fast tokenizer; what it lacks to train on chats is set, so it is also saved with the result."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, **_LOCAL)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise InvalidModel(f"{path}: its tokenizer can't be loaded: {error}") from error
    if not tokenizer.is_fast:
        raise InvalidModel(f"{path}: its tokenizer gives no offsets; save it as tokenizer.json")
    if tokenizer.eos_token is None:
        raise InvalidModel(f"{path}: its tokenizer has no eos_token, so an answer could not end")
    if tokenizer.pad_token is None:
        # Padding is masked in attention and loss: any token will do.
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.chat_template is None:
        tokenizer.chat_template = DEFAULT_TEMPLATE
    return tokenizer


def switch_off_dropout(target: PretrainedConfig | nn.Module) -> None:
    """Set every dropout probability to 0, in a config before the model is built or in the built model.

    Each rank would draw masks of its own, so the result would depend on how many ranks there are and on
    how a batch is dealt to them.
    """
    if isinstance(target, nn.Module):
        for module in target.modules():
            if isinstance(module, _DROPOUTS):
                module.p = 0.0
            _zero_dropout_attributes(module)
        return
    _zero_dropout_attributes(target)
    for value in list(vars(target).values()):
        if isinstance(value, PretrainedConfig):
            switch_off_dropout(value)


def _zero_dropout_attributes(holder: object) -> None:
    """GPT-2 says ``attn_pdrop``, BART ``decoder_layerdrop``, Llama ``attention_dropout``."""
    for name, value in list(vars(holder).items()):
        if "drop" in name and isinstance(value, float):
            setattr(holder, name, 0.0)


def _refuse_incomplete(path: Path, info: dict[str, Any]) -> None:
    """transformers gives weights that it doesn't find random values and goes on."""
    for problem in ("missing_keys", "mismatched_keys"):
        names = sorted(str(name) for name in info[problem])
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise InvalidModel(
                f"{path}: weights do not fit its config ({problem.removesuffix('_keys')}: "
                f"{', '.join(names[:3])}{more})"
            )
