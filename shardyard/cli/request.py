"""What the options of ``jobs submit`` ask of the server. Options that contradict each other are wrong usage.

Nothing that is not given is sent, so that every default is the server's.
"""

import json
from dataclasses import dataclass
from typing import Any

import typer

from shardyard.client import Json


@dataclass(frozen=True)
class Adapter:
    """The options that ``--lora`` allows."""

    wanted: bool
    r: int | None
    quantization: str | None
    merge: bool

    def settings(self) -> Json | None:
        given = {"r": self.r, "quantization": self.quantization, "merge": self.merge or None}
        settings = without_none(given)
        if self.wanted:
            return settings
        options = {"r": "--lora-r", "quantization": "--quantization", "merge": "--merge"}
        for name in settings:
            raise typer.BadParameter(f"{options[name]} is a setting of LoRA: add --lora")
        return None


def method_field(method: str | None, beta: float | None) -> Json | None:
    """OpenAI's ``method``."""
    if beta is not None and method != "dpo":
        raise typer.BadParameter("--beta is a setting of DPO: add --method dpo")
    if method is None:
        return None
    if beta is None:
        return {"type": method}
    return {"type": "dpo", "dpo": {"hyperparameters": {"beta": beta}}}


def training_field(options: Json, adapter: Json | None, pairs: list[str]) -> Json:
    """Native ``training``: what has an option of its own, then ``--set``, which has the last word."""
    training = without_none(options)
    if adapter is not None:
        training["lora"] = adapter
    for pair in pairs:
        _set(training, pair)
    return training


def check_validation(training: Json, validation_file: str | None) -> None:
    split = training.get("validation_split")
    if split is not None and validation_file is not None:
        raise typer.BadParameter(
            "--validation-split is for a job without --validation-file: give one of them"
        )
    if training.get("eval_samples") and split is None and validation_file is None:
        raise typer.BadParameter(
            "--eval-samples takes its prompts from validation: add --validation-file or --validation-split"
        )


def without_none(options: Json) -> Json:
    return {name: value for name, value in options.items() if value is not None}


def _set(training: Json, pair: str) -> None:
    """``KEY=VALUE``: dots in the key go into objects, and the value is JSON if it can be read as such."""
    key, equals, value = pair.partition("=")
    *outer, last = key.split(".")
    if not equals or not all([*outer, last]):
        raise typer.BadParameter(f"--set {pair}: write KEY=VALUE, or KEY.KEY=VALUE")
    place = training
    for name in outer:
        place = place.setdefault(name, {})
        if not isinstance(place, dict):
            raise typer.BadParameter(f"--set {pair}: {name} is {place!r}, which has no fields")
    place[last] = _value(value)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
