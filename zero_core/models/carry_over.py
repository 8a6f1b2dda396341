"""What a result has from its base beside the weights: each file byte for byte, but for the chat template."""

import json
import shutil
from pathlib import Path
from typing import Any

from zero_core.models.loading import DEFAULT_TEMPLATE
from zero_core.models.model_files import files_beside

_OF_THE_MODEL = ("config.json", "generation_config.json")
_TEMPLATE = "chat_template.jinja"
_TOKENIZER_CONFIG = "tokenizer_config.json"


def carry_over(base: Path, target: Path, chat_template: str | None, *, tokenizer_alone: bool = False) -> None:
    """Copy the base's files into ``target``, with the template that was trained with, if it is another.

    ``chat_template`` is the job's own. A base without any was trained with the default one. An adapter's
    directory takes the tokenizer alone: with a config it would be taken for a model.
    """
    for file in files_beside(base):
        if not (tokenizer_alone and file.name in _OF_THE_MODEL):
            shutil.copyfile(file, target / file.name)
    config = _tokenizer_config(target)
    in_config = config.get("chat_template") is not None
    in_file = (target / _TEMPLATE).is_file()
    if chat_template is None:
        if in_config or in_file:
            return
        chat_template = DEFAULT_TEMPLATE
    if in_config:
        config["chat_template"] = _replaced(config["chat_template"], chat_template)
        text = json.dumps(config, indent=2, ensure_ascii=False)
        (target / _TOKENIZER_CONFIG).write_text(text + "\n", encoding="utf-8")
    if in_file or not in_config:
        (target / _TEMPLATE).write_text(chat_template, encoding="utf-8")


def _tokenizer_config(directory: Path) -> dict[str, Any]:
    path = directory / _TOKENIZER_CONFIG
    config: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
    return config


def _replaced(stored: Any, chat_template: str) -> Any:
    """Where several templates have names, the default one is meant."""
    if not isinstance(stored, list):
        return chat_template
    others = [entry for entry in stored if entry.get("name") != "default"]
    return [{"name": "default", "template": chat_template}, *others]
