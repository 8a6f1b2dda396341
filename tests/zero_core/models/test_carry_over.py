"""What a result has from its base beside the weights."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.tiny_model import CHATML, byte_tokenizer, write_tiny_model
from zero_core.models.carry_over import carry_over
from zero_core.models.loading import DEFAULT_TEMPLATE

OWN = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "base", hidden=16, layers=1)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "result"
    path.mkdir()
    return path


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def edit_tokenizer_config(path: Path, **changes: Any) -> None:
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def move_template_into_config(path: Path, template: Any) -> None:
    (path / "chat_template.jinja").unlink()
    edit_tokenizer_config(path, chat_template=template)


def test_every_file_but_weights_and_code_comes_byte_for_byte(base: Path, target: Path) -> None:
    (base / "config.json").write_text((base / "config.json").read_text().replace("\n", "\r\n") + " ")
    kept = {
        name: os.urandom(64)
        for name in (
            "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
            "preprocessor_config.json", "LICENSE",
        )
    }  # fmt: skip
    left = ("own.py", "README.md", ".hidden.json", "pytorch_model.bin.index.json", "onnx.bin")
    for name, content in (kept | dict.fromkeys(left, b"x")).items():
        (base / name).write_bytes(content)
    (base / "more.json").mkdir()
    carry_over(base, target, None)
    names = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    names |= {"chat_template.jinja"}
    expected = {
        name: content for name, content in contents_of_files(base).items() if name in names | kept.keys()
    }
    assert contents(target) == expected
    assert len(expected) == 12


def contents_of_files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}


def test_files_can_be_read_by_whoever_may_read_the_directory(base: Path, target: Path) -> None:
    for file in base.iterdir():
        file.chmod(0o600)
    carry_over(base, target, None)
    umask = os.umask(0)
    os.umask(umask)
    assert {file.stat().st_mode & 0o777 for file in target.iterdir()} == {0o666 & ~umask}


def test_a_template_of_the_jobs_own_is_put_where_the_bases_is(base: Path, target: Path) -> None:
    carry_over(base, target, OWN)
    assert (target / "chat_template.jinja").read_text() == OWN
    before, after = contents(base), contents(target)
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {"chat_template.jinja"}
    assert AutoTokenizer.from_pretrained(target).chat_template == OWN


def test_in_the_config_too(base: Path, target: Path) -> None:
    move_template_into_config(base, CHATML)
    carry_over(base, target, OWN)
    before, after = [json.loads((p / "tokenizer_config.json").read_text()) for p in (base, target)]
    assert after == before | {"chat_template": OWN}
    assert list(after) == list(before)
    assert not (target / "chat_template.jinja").exists()
    assert AutoTokenizer.from_pretrained(target).chat_template == OWN


def test_of_several_templates_with_names_the_default_one_is_replaced(base: Path, target: Path) -> None:
    tool = {"name": "tool_use", "template": CHATML}
    move_template_into_config(base, [{"name": "default", "template": CHATML}, tool])
    carry_over(base, target, OWN)
    after = json.loads((target / "tokenizer_config.json").read_text())["chat_template"]
    assert after == [{"name": "default", "template": OWN}, tool]


def test_a_base_without_a_template_gets_the_one_that_it_was_trained_with(base: Path, target: Path) -> None:
    byte_tokenizer(None).save_pretrained(base)
    (base / "chat_template.jinja").unlink()
    carry_over(base, target, None)
    assert AutoTokenizer.from_pretrained(target).chat_template == DEFAULT_TEMPLATE
    assert (target / "tokenizer_config.json").read_bytes() == (base / "tokenizer_config.json").read_bytes()
