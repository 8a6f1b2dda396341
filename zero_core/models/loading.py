"""Models and tokenizers from local directories: safetensors only, no code of theirs, no network."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from zero_core.models.model_files import InvalidModel, check_model_dir
from zero_core.models.weights import WeightFiles, find_weights

DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + eos_token + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""For a model without a template: ChatML, with the model's own end-of-sequence token after each turn."""

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


@dataclass(frozen=True)
class OpenModel:
    """A model to be trained, without its values."""

    model: PreTrainedModel
    """Parameters on the meta device, buffers on the CPU with their values."""

    weights: WeightFiles
    """Where the parameters' values come from: ``ZeroEngine(..., weights=...)``."""

    tokenizer: PreTrainedTokenizerBase
    """With an end, a padding and a chat template."""


def open_model(path: Path, dtype: torch.dtype) -> OpenModel:
    """The model of a directory, built as ``from_pretrained`` does but for reading its parameters.

    Raises InvalidModel, which names the directory.
    """
    check_model_dir(path)
    tokenizer = load_tokenizer(path)
    model = _empty_model(path, dtype)
    weights = find_weights(path, model)
    embeddings: Any = model.get_input_embeddings()
    rows = embeddings.num_embeddings
    if len(tokenizer) > rows:
        raise InvalidModel(f"{path}: the tokenizer has {len(tokenizer)} tokens, the embedding {rows} rows")
    return OpenModel(model, weights, tokenizer)


def load_model(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """``open_model`` with the values read: the whole model on the CPU."""
    opened = open_model(path, dtype)
    for name, parameter in list(opened.model.named_parameters()):
        values = opened.weights.read(name, 0, parameter.numel()).view(parameter.shape)
        torch.utils.swap_tensors(parameter, nn.Parameter(values.to(parameter.dtype)))
    return opened.model, opened.tokenizer


def _empty_model(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    try:
        config = AutoConfig.from_pretrained(path, **_LOCAL)
        switch_off_dropout(config)
        if getattr(config, "quantization_config", None) is not None:
            raise InvalidModel(f"{path} holds quantized weights: save it in fp32, bf16 or fp16")
        with init_empty_weights(include_buffers=False):
            # Attention is torch's (sdpa) where the architecture has it.
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=dtype, trust_remote_code=False
            )
        if (path / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    except InvalidModel:
        raise
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise InvalidModel(f"{path} can't be loaded: {error}") from error
    switch_off_dropout(model)
    # The cache serves generation alone, which asks for it itself.
    model.config.use_cache = False
    return model


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
