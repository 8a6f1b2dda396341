"""``python -m zero_core.data.preview FILE --model DIR``: what a model is to learn of a training file.

Prints the text of the first examples as the model's chat template makes it, with what is learnt marked: in
colour on a terminal, else between ⟦ and ⟧. ``--json`` prints one JSON object a line instead::

    {"line": 1, "notes": [{"code": "...", "message": "..."}], "sequences":
     [{"tokens": 12, "target_tokens": 3, "pieces": [{"text": "...", "learnt": true}]}]}

The file's lines, the model and the template may be at fault: the message says how, and the exit status is 1.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO, get_args

from transformers.utils import logging

from zero_core.config.train import TrainOn
from zero_core.data.chat_template import AmbiguousTemplate, TemplateRefusal
from zero_core.data.formats import read_examples
from zero_core.data.template_settings import TemplateSettings, stop_token_ids
from zero_core.data.tokenize import ExampleTokenizer, Note, Piece
from zero_core.models.loading import load_tokenizer

_LEARNT, _PLAIN = "\x1b[1;32m", "\x1b[0m"


@dataclass(frozen=True)
class PreviewedSequence:
    pieces: tuple[Piece, ...]
    tokens: int
    target_tokens: int


@dataclass(frozen=True)
class PreviewedExample:
    line: int
    sequences: tuple[PreviewedSequence, ...]
    """One, or the chosen and the rejected one of a preference example."""

    notes: tuple[Note, ...]


def preview(file: Path, model: Path, settings: TemplateSettings, examples: int) -> Iterator[PreviewedExample]:
    """The first examples of ``file``. Raises InvalidFile or InvalidModel, or ValueError at a conversation
    that the template does not take."""
    tokenize = ExampleTokenizer(load_tokenizer(model), settings)
    for example in islice(read_examples(file), examples):
        try:
            tokenized, texts = tokenize(example), tokenize.annotate(example)
        except (TemplateRefusal, AmbiguousTemplate) as error:
            raise ValueError(f"line {example.line}: {error}") from error
        sequences = tuple(
            PreviewedSequence(pieces, len(tokens), tokens.target_tokens)
            for pieces, tokens in zip(texts, tokenized.sample, strict=True)
        )
        yield PreviewedExample(example.line, sequences, tokenized.notes)


def as_json(example: PreviewedExample) -> dict[str, Any]:
    return {
        "line": example.line,
        "sequences": [
            {
                "tokens": sequence.tokens,
                "target_tokens": sequence.target_tokens,
                "pieces": [{"text": text, "learnt": learnt} for text, learnt in sequence.pieces],
            }
            for sequence in example.sequences
        ],
        "notes": [{"code": note.value, "message": note.sentence} for note in example.notes],
    }


def write(example: PreviewedExample, out: TextIO, colour: bool) -> None:
    titles = [""] if len(example.sequences) == 1 else [", chosen", ", rejected"]
    for title, sequence in zip(titles, example.sequences, strict=True):
        counts = f"{sequence.tokens} tokens, {sequence.target_tokens} learnt"
        out.write(f"--- line {example.line}{title}: {counts}\n")
        for text, learnt in sequence.pieces:
            shown = _escaped(text)
            if learnt:
                shown = f"{_LEARNT}{shown}{_PLAIN}" if colour else f"⟦{shown}⟧"
            out.write(shown)
        out.write("\n")
    for note in example.notes:
        out.write(f"    note {note.value}: {note.sentence}\n")


def _escaped(text: str) -> str:
    """A file's own escape sequences must not steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def main() -> int:
    parser = argparse.ArgumentParser(description="Show what a model is to learn of a training file.")
    parser.add_argument("file", type=Path, help="JSON lines: chats, completions, texts or preferences")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory")
    parser.add_argument("--lines", type=int, default=3, help="how many examples to show")
    parser.add_argument("--json", action="store_true", help="one JSON object for each example")
    parser.add_argument("--chat-template", type=Path, help="a Jinja file to use instead of the model's own")
    parser.add_argument("--chat-template-kwargs", default="{}", help="variables for it, as a JSON object")
    parser.add_argument("--train-on", choices=get_args(TrainOn), default="all", help="which answers to learn")
    options = parser.parse_args()
    if options.lines < 1:
        parser.error("--lines must be at least 1")
    logging.set_verbosity_error()
    try:
        settings = TemplateSettings(
            chat_template=options.chat_template.read_text() if options.chat_template else None,
            kwargs=_object(options.chat_template_kwargs),
            train_on=options.train_on,
            stop_token_ids=stop_token_ids(options.model),
        )
        for example in preview(options.file, options.model, settings, options.lines):
            if options.json:
                print(json.dumps(as_json(example), ensure_ascii=False))
            else:
                write(example, sys.stdout, colour=sys.stdout.isatty())
    except (ValueError, OSError) as error:  # every refusal of a file, a model or a template is a ValueError
        print("error:", str(error).replace("\n", " "), file=sys.stderr)
        return 1
    return 0


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"--chat-template-kwargs: {text} is no JSON object")
    return value


if __name__ == "__main__":
    sys.exit(main())
