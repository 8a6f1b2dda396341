"""Everything that decides which tokens an example becomes, and the way from one to the other."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from zero_core.config.train import Overflow, TrainConfig, TrainOn
from zero_core.data.chat_template import AmbiguousTemplate, TemplateRefusal
from zero_core.data.examples import CompletionExample, Example, TextExample
from zero_core.data.fitting import CannotSplit, Fate, fit
from zero_core.data.notes import Note
from zero_core.data.template_settings import TemplateSettings, stop_token_ids
from zero_core.data.tokenize import ExampleTokenizer, Sample
from zero_core.models.loading import load_tokenizer


@dataclass(frozen=True)
class Recipe:
    model_dir: Path
    """Has the tokenizer, its chat template, and the tokens at which the model stops."""

    max_length: int
    overflow: Overflow = "truncate"
    train_on: TrainOn = "all"
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model_dir: Path, train: TrainConfig, max_length: int) -> "Recipe":
        """``max_length``: the run's, or as many positions as the model has."""
        return cls(
            model_dir,
            max_length,
            train.overflow,
            train.train_on,
            train.chat_template,
            dict(train.chat_template_kwargs),
        )

    def settings(self) -> dict[str, Any]:
        """All of it but the directory, as JSON."""
        return {name: value for name, value in asdict(self).items() if name != "model_dir"}

    def preparer(self) -> "ExamplePreparer":
        """Raises InvalidModel."""
        template = TemplateSettings(
            self.chat_template, self.chat_template_kwargs, self.train_on, stop_token_ids(self.model_dir)
        )
        return ExamplePreparer(ExampleTokenizer(load_tokenizer(self.model_dir), template), self)


class Fault(StrEnum):
    """Why an example can't be used: its own fault, or (the last) its template's."""

    TEMPLATE_REFUSED = "template_refused"
    CANNOT_SPLIT = "cannot_split"
    AMBIGUOUS_TEMPLATE = "ambiguous_template"


@dataclass(frozen=True)
class Prepared:
    """What one example became."""

    line: int
    fate: Fate
    samples: tuple[Sample, ...] = ()
    notes: tuple[Note, ...] = ()
    fault: Fault | None = None
    message: str = ""
    """Of the fault."""


class ExamplePreparer:
    def __init__(self, tokenizer: ExampleTokenizer, recipe: Recipe) -> None:
        self._tokenizer = tokenizer
        self._recipe = recipe

    def __call__(self, example: Example) -> Prepared:
        running_text = isinstance(example, CompletionExample | TextExample)
        try:
            tokenized = self._tokenizer(example)
            fitted = fit(tokenized.sample, self._recipe.max_length, self._recipe.overflow, running_text)
        except TemplateRefusal as error:
            return _faulty(example, Fault.TEMPLATE_REFUSED, error)
        except AmbiguousTemplate as error:
            return _faulty(example, Fault.AMBIGUOUS_TEMPLATE, error)
        except CannotSplit as error:
            return _faulty(example, Fault.CANNOT_SPLIT, error)
        return Prepared(example.line, fitted.fate, fitted.samples, tokenized.notes)


def _faulty(example: Example, fault: Fault, error: Exception) -> Prepared:
    return Prepared(example.line, Fate.NO_TARGET, fault=fault, message=str(error))
