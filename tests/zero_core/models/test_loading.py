import json
import socket
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from tests.tiny_model import byte_tokenizer, write_tiny_model
from zero_core.models.loading import load_model, load_tokenizer, switch_off_dropout
from zero_core.models.model_files import InvalidModel


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> NoReturn:
        pytest.fail("a model's loading went to the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_loaded_to_be_trained(tmp_path: Path, tie: bool, dtype: torch.dtype) -> None:
    path = write_tiny_model(tmp_path / "model", tie=tie)
    model, tokenizer = load_model(path, dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie
    assert model.config._attn_implementation == "sdpa"
    assert not model.config.use_cache
    assert tokenizer.pad_token == tokenizer.eos_token == "<|im_end|>"
    ids = torch.tensor([tokenizer("hi").input_ids])
    assert model(input_ids=ids).past_key_values is None


def test_no_dropout_is_left(tmp_path: Path) -> None:
    config = GPT2Config(
        vocab_size=258, n_positions=32, n_embd=16, n_layer=1, n_head=2,
        resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    model, _ = load_model(tmp_path, torch.float32)
    model.train()
    ids = torch.arange(8)[None]
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    assert (model.config.resid_pdrop, model.config.embd_pdrop, model.config.attn_pdrop) == (0, 0, 0)


def test_dropout_that_no_config_names_is_switched_off() -> None:
    attention = torch.nn.MultiheadAttention(4, 1, dropout=0.5)
    dropout = torch.nn.Dropout(0.5)
    switch_off_dropout(torch.nn.ModuleList([dropout, torch.nn.Sequential(attention)]))
    assert [dropout.p, attention.dropout] == [0, 0]


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidModel, match=r"missing: model\.norm\.weight"):
        load_model(path, torch.float32)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    with pytest.raises(InvalidModel, match=r"mismatched: .*down_proj.* and 3 more"):
        load_model(path, torch.float32)


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "none-such"}))
    with pytest.raises(InvalidModel, match="can't be loaded"):
        load_model(path, torch.float32)


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model")
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<extra>"])
    tokenizer.save_pretrained(path)
    with pytest.raises(InvalidModel, match="259 tokens, the embedding 258 rows"):
        load_model(path, torch.float32)


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InvalidModel, match="no eos_token"):
        load_tokenizer(tmp_path)
