"""Where an assistant's turn begins to be the model's own: after what the template gives it to go on.

That is what the template writes for ``add_generation_prompt`` after the messages so far. It depends on the
message before, hardly on more, so a prefix of the conversation is rendered for each kind of message before
an answer and not for each answer.
"""

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from zero_core.data.control_tokens import ControlTokens
from zero_core.data.examples import Message
from zero_core.data.template_messages import call_names
from zero_core.data.template_trace import TEMPLATE_ERRORS, TracedTemplate

_QUESTION: Message = {"role": "user", "content": "x"}
_ANSWER: Message = {"role": "assistant", "content": "y"}
# In a user's or system message these switch thoughts off or on in several templates.
_SWITCHES = ("/no_think", "/nothink", "/think")


class TemplateHeader:
    """A template's header where there is nothing to learn it from but a question."""

    def __init__(self, template: TracedTemplate, variables: Mapping[str, Any]) -> None:
        self.prompts = True
        """Whether the template knows ``add_generation_prompt``; if not the header is found from an answer."""

        self.text = ""
        try:
            without = template.text([_QUESTION], variables)
            self.prompts = without != template.text([_QUESTION], _prompting(variables))
        except TEMPLATE_ERRORS:
            return
        tail = (
            _tail(template, [_QUESTION], variables) if self.prompts else _before_answer(template, variables)
        )
        self.text = tail or ""


class Headers:
    """The headers of one conversation's answers."""

    def __init__(
        self,
        template: TracedTemplate,
        messages: list[Message],
        variables: Mapping[str, Any],
        fallback: TemplateHeader,
    ) -> None:
        self._template = template
        self._messages = messages
        self._variables = variables
        self._fallback = fallback
        self._known: dict[tuple[object, ...], str] = {}

    def end(self, text: str, index: int, start: int, limit: int, tokens: ControlTokens) -> int:
        """Where the header ends in the turn of message ``index`` that begins at ``start``.

        ``limit`` is where the message's own text begins, or the turn's end.
        """
        header = self._before(index)
        # The spaces between two turns may have been written with the one before.
        bare = header.lstrip()
        # After a tool's answer some templates give no header and write one all the same.
        for given in (header, bare, self._fallback.text):
            if given and text.startswith(given, start):
                return start + len(given)
        return _shared_end(text, header if text[start].isspace() else bare, start, limit, tokens)

    def _before(self, index: int) -> str:
        """What the model is given to write message ``index``, after the message before it."""
        if index == 0 or not self._fallback.prompts:
            return self._fallback.text
        kind = _kind(self._messages[index - 1])
        if kind not in self._known:
            tail = _tail(self._template, self._messages[:index], self._variables)
            self._known[kind] = self._fallback.text if tail is None else tail
        return self._known[kind]


def _shared_end(text: str, header: str, start: int, limit: int, tokens: ControlTokens) -> int:
    """The end of what a turn has of a longer header: a prompt that opens a thought is one for an answer
    that has none. Whole tokens and words count, up to the message's own text."""
    written = zip(header, text[start : start + len(header)], strict=False)
    shared = start + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], written))
    if shared >= limit:
        return limit
    ends = [found.end() for found in tokens.between(text, start, shared)]
    spaces = [at + 1 for at in range(start, shared) if text[at].isspace()]
    return max([start, *ends, *spaces])


def _kind(message: Message) -> tuple[object, ...]:
    content = message.get("content") or ""
    return message["role"], bool(call_names(message)), *(switch in content for switch in _SWITCHES)


def _prompting(variables: Mapping[str, Any]) -> dict[str, Any]:
    return {**variables, "add_generation_prompt": True}


def _tail(template: TracedTemplate, messages: list[Message], variables: Mapping[str, Any]) -> str | None:
    """What the template writes after the last of ``messages`` to have it answered."""
    try:
        text = template.text(messages, _prompting(variables))
    except TEMPLATE_ERRORS:
        return None
    trace = template.trace(messages, _prompting(variables), text, fields=False)
    if trace is None:
        return None
    return text[max((end for _, end, owner in trace.owners if owner is not None), default=len(text)) :]


def _before_answer(template: TracedTemplate, variables: Mapping[str, Any]) -> str | None:
    """For a template that gives the model no header of its turn: what it writes before an answer's text.
    Spaces alone are no header: the model writes them."""
    messages = [_QUESTION, _ANSWER]
    try:
        text = template.text(messages, variables)
    except TEMPLATE_ERRORS:
        return None
    trace = template.trace(messages, variables, text, fields=True)
    if trace is None or not trace.pieces(1):
        return None
    turn_start, turn_end = trace.pieces(1)[0]
    own = [
        start for start, end, index in trace.fields if index == 1 and turn_start <= start and end <= turn_end
    ]
    header = text[turn_start : own[0]] if own else ""
    return header if header.strip() else None
