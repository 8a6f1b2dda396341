"""How conversations become text: the settings of a job for its chat template."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_core.config.train import TrainOn

_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"}
)


@dataclass(frozen=True)
class TemplateSettings:
    chat_template: str | None = None
    """A Jinja template to use instead of the tokenizer's."""

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the template, JSON values only: a template is not trusted with objects."""

    train_on: TrainOn = "all"
    """``last``: of the answers with a weight of 1 only the last is learnt."""

    stop_token_ids: frozenset[int] = frozenset()
    """Tokens at which the model stops besides the tokenizer's ``eos_token``; see ``stop_token_ids``."""

    def __post_init__(self) -> None:
        for name in sorted(_RESERVED & set(self.kwargs)):
            raise ValueError(f"chat_template_kwargs: {name!r} is set by the conversation itself")
        try:
            plain = json.loads(json.dumps(dict(self.kwargs), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(f"chat_template_kwargs: {error}") from error
        object.__setattr__(self, "kwargs", plain)


def stop_token_ids(model_dir: Path) -> frozenset[int]:
    """The ``eos_token_id`` of a model directory's generation config; of its config where it has none."""
    for name in ("generation_config.json", "config.json"):
        try:
            found = json.loads((model_dir / name).read_bytes()).get("eos_token_id")
        except FileNotFoundError:
            continue
        if found is not None:
            return frozenset(map(int, found if isinstance(found, list) else [found]))
    return frozenset()
