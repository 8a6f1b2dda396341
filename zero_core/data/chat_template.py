"""A conversation as the text that the model's chat template makes of it, with the parts to learn.

The text is always the template's own, of the whole conversation. To learn is what the model has to write
itself: everything after the header of an assistant's turn, up to and with the token that ends the turn. A
template with ``{% generation %}`` says where that is; for any other it follows from a trace of the
template. A template that can't be traced is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from zero_core.data.control_tokens import ControlTokens
from zero_core.data.examples import ChatExample, Message
from zero_core.data.headers import Headers, TemplateHeader
from zero_core.data.left_out import left_out
from zero_core.data.notes import Note
from zero_core.data.template_messages import (
    TemplateRefusal,
    call_names,
    forms,
    messages_for,
    prints_python,
)
from zero_core.data.template_settings import TemplateSettings
from zero_core.data.template_trace import TEMPLATE_ERRORS, Span, Trace, TracedTemplate
from zero_core.data.turns import Turns, end_note
from zero_core.models.loading import DEFAULT_TEMPLATE

__all__ = ["AmbiguousTemplate", "ChatTemplate", "RenderedChat", "Span", "TemplateRefusal"]


class AmbiguousTemplate(ValueError):
    """The template does not show where the assistant's words are, or can't be used at all."""


@dataclass(frozen=True)
class RenderedChat:
    text: str
    targets: tuple[Span, ...]
    """In order, without overlap."""

    notes: tuple[Note, ...] = ()


class ChatTemplate:
    """A tokenizer's chat template, a job's own, or the default."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: TemplateSettings | None = None) -> None:
        self._tokenizer = tokenizer
        self._settings = settings or TemplateSettings()
        self._variables = {**tokenizer.special_tokens_map, **self._settings.kwargs}
        self._tokens = ControlTokens.of(tokenizer, self._settings.stop_token_ids)
        self._compiled: dict[str, _Compiled] = {}

    def render(self, example: ChatExample) -> RenderedChat:
        """Raises TemplateRefusal (the example's fault) or AmbiguousTemplate (the template's)."""
        tools = list(example.tools) or None
        compiled = self._template_for(tools)
        variables = {**self._variables, "tools": tools}
        given = messages_for(compiled.template.source, example.messages, tools is not None)
        messages, trace = _accepted(compiled.template, given, variables)
        trained = self._trained(example)
        if compiled.template.has_generation:
            found = _generated(trace, given, trained, self._tokens)
        else:
            headers = Headers(compiled.template, messages, variables, compiled.header)
            found = _found(Turns(trace, headers, self._tokens, len(messages)), trained)
        for index, spans in found.by_message.items():
            missing = _missing_call(given[index], "".join(trace.text[start:end] for start, end in spans))
            if missing is not None:
                raise TemplateRefusal(f"calls {missing}, and the model's chat template leaves the call out")
        notes = found.notes | left_out(given, trained, trace)
        return RenderedChat(trace.text, tuple(found.spans), tuple(note for note in Note if note in notes))

    def _template_for(self, tools: list[dict[str, Any]] | None) -> "_Compiled":
        try:
            source = self._source(tools)
            if source not in self._compiled:
                self._compiled[source] = _Compiled(TracedTemplate(source), self._variables)
        except TemplateSyntaxError as error:
            raise AmbiguousTemplate(
                f"it is no valid Jinja template: line {error.lineno}: {error.message}"
            ) from error
        except ValueError as error:  # of several templates none is for a conversation like this
            raise AmbiguousTemplate(str(error)) from error
        return self._compiled[source]

    def _source(self, tools: list[dict[str, Any]] | None) -> str:
        if self._settings.chat_template is not None:
            return self._settings.chat_template
        if self._tokenizer.chat_template is None:
            return DEFAULT_TEMPLATE
        return str(self._tokenizer.get_chat_template(tools=tools))

    def _trained(self, example: ChatExample) -> list[bool]:
        if self._settings.train_on == "all":
            return list(example.trained)
        last = max((index for index, wanted in enumerate(example.trained) if wanted), default=None)
        return [index == last for index in range(len(example.trained))]


class _Compiled:
    def __init__(self, template: TracedTemplate, variables: Mapping[str, Any]) -> None:
        self.template = template
        self._variables = {**variables, "tools": None}

    @cached_property
    def header(self) -> TemplateHeader:
        return TemplateHeader(self.template, self._variables)


@dataclass(frozen=True)
class _Found:
    spans: list[Span]
    by_message: dict[int, list[Span]]
    """What is learnt of each message that is."""

    notes: set[Note]


def _accepted(
    template: TracedTemplate, given: list[Message], variables: Mapping[str, Any]
) -> tuple[list[Message], Trace]:
    """The first form of the messages that the template takes as it is meant, and its trace."""
    second_best: tuple[list[Message], Trace] | None = None
    refusal: Exception | None = None
    for messages in forms(given):
        try:
            text = template.text(messages, variables)
        except TEMPLATE_ERRORS as error:
            refusal = refusal or error
            continue
        trace = _traced(template, messages, variables, text)
        if not (
            prints_python(text, messages)
            or _prints_null(template, messages, variables, text)
            or any(_missing_call(message, trace.text_of(i)) for i, message in enumerate(messages))
        ):
            return messages, trace
        second_best = second_best or (messages, trace)
    if second_best is not None:
        return second_best
    raise TemplateRefusal(f"is refused by the model's chat template: {refusal}") from refusal


def _missing_call(message: Message, written: str) -> str | None:
    """The first tool that ``message`` calls and whose name is not ``written``."""
    return next((name for name in call_names(message) if name not in written), None)


def _prints_null(
    template: TracedTemplate, messages: list[Message], variables: Mapping[str, Any], text: str
) -> bool:
    """Whether the template printed content that is null as the word None."""
    if "None" not in text or not any(message.get("content", "") is None for message in messages):
        return False
    empty = [m | {"content": ""} if m.get("content", "") is None else m for m in messages]
    try:
        without = template.text(empty, variables)
    except TEMPLATE_ERRORS:
        return False
    # A template that leaves the calls out where there is content tells nothing about the word.
    same_calls = all(text.count(name) == without.count(name) for m in messages for name in set(call_names(m)))
    return same_calls and text.count("None") > without.count("None")


def _traced(
    template: TracedTemplate, messages: list[Message], variables: Mapping[str, Any], text: str
) -> Trace:
    for fields in (True, False):
        trace = template.trace(messages, variables, text, fields=fields)
        if trace is not None:
            return trace
    raise AmbiguousTemplate("the template works on its own output, so its parts can't be told apart")


def _found(turns: Turns, trained: list[bool]) -> _Found:
    by_message: dict[int, list[Span]] = {}
    notes: set[Note] = set()
    for index, wanted in enumerate(trained):
        if not wanted:
            continue
        turn = turns.turn(index)
        if turn is None:
            raise AmbiguousTemplate(f"message {index} is not written by a loop over the messages")
        by_message[index] = turn.spans
        notes |= {turn.note} if turn.note else set()
    return _Found(_merged([span for spans in by_message.values() for span in spans]), by_message, notes)


def _generated(trace: Trace, messages: list[Message], trained: list[bool], tokens: ControlTokens) -> _Found:
    """The generation blocks, but for what answers wrote that are not to be learnt."""
    answers = [message["role"] == "assistant" for message in messages]
    unowned: list[Span] = []
    spans: list[Span] = []
    by_message: dict[int, list[Span]] = {index: [] for index, wanted in enumerate(trained) if wanted}
    for start, end, owner in trace.generated_by():
        if owner is not None and answers[owner] and not trained[owner]:
            continue
        spans.append((start, end))
        if owner is None:
            unowned.append((start, end))
        elif trained[owner]:
            by_message[owner].append((start, end))
    if unowned and trained != answers:
        raise AmbiguousTemplate("a generation block is of no one message, and some are not to be learnt")
    if not spans:
        raise AmbiguousTemplate("no generation block is written for an answer")
    ends = [(own or unowned)[-1:] for own in by_message.values()]
    notes = {end_note(trace.text, end[0], tokens) if end else Note.END_NOT_LEARNT for end in ends}
    by_message = {index: own + unowned for index, own in by_message.items()}
    return _Found(_merged(spans), by_message, {note for note in notes if note is not None})


def _merged(spans: list[Span]) -> list[Span]:
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            last_start, last_end = merged.pop()
            start, end = last_start, max(last_end, end)
        merged.append((start, end))
    return merged
