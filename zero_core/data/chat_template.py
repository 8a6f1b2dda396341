"""A conversation as the text that the model's chat template makes of it, with the parts to learn.

To learn is what the model has to write itself: everything after the header of an assistant's turn, up
to and with the token that ends the turn. A template with ``{% generation %}`` says where that is. For
any other the conversation is rendered again with a marker in place of one assistant message: what
differs is that message. A template for which this gives no clear answer is refused.
"""

import re
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from zero_core.data.examples import ChatExample, Message
from zero_core.data.lines import LineProblem, parse_json
from zero_core.models.loading import DEFAULT_TEMPLATE

# A template may print today's date. A run that is resumed tomorrow must see the same tokens, so the date
# stands still: at the one that Llama's templates fall back to.
_FIXED_DATE = (
    "{%- macro strftime_now(format) -%}"
    "{{ format | replace('%d', '26') | replace('%b', 'Jul') | replace('%B', 'July') | replace('%m', '07')"
    " | replace('%Y', '2024') | replace('%y', '24') | replace('%A', 'Friday') | replace('%a', 'Fri')"
    " | replace('%H', '00') | replace('%M', '00') | replace('%S', '00') }}"
    "{%- endmacro -%}"
)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARKER = "MARKEDANSWER"
# What a template can raise: its own refusals and Jinja's, and Python's on a value of another shape.
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError)

Span = tuple[int, int]
"""Characters [start, end) of the rendered text."""


class TemplateRefusal(ValueError):
    """The template raised on a conversation, or cannot express a part of it."""


class AmbiguousTemplate(ValueError):
    """Where the assistant's words are can't be told from the rendered text."""


@dataclass(frozen=True)
class RenderedChat:
    text: str
    targets: tuple[Span, ...]
    """In order, without overlap."""


class ChatTemplate:
    """A tokenizer's chat template, or the default."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._control_tokens = _any_of(
            [str(token) for token in tokenizer.added_tokens_encoder if not str(token).isspace()]
        )

    def render(self, example: ChatExample) -> RenderedChat:
        """Raises TemplateRefusal (the example's fault) or AmbiguousTemplate (the template's)."""
        tools = list(example.tools) or None
        source = self._source(tools)
        chat = _Conversation(source, self._tokenizer, _for_template(example, source), tools)
        answers = [i for i, message in enumerate(example.messages) if message["role"] == "assistant"]
        if _GENERATION.search(source):
            text, spans = chat.with_generation_spans()
            return RenderedChat(text, _weighted(spans, [example.trained[i] for i in answers]))
        trained = [i for i in answers if example.trained[i]]
        return RenderedChat(chat.text, tuple(self._span(chat, index) for index in trained))

    def _source(self, tools: list[dict[str, Any]] | None) -> str:
        if self._tokenizer.chat_template is None:
            return DEFAULT_TEMPLATE
        return str(self._tokenizer.get_chat_template(tools=tools))

    def _span(self, chat: "_Conversation", index: int) -> Span:
        """The part of message ``index``: after its header, to the end of its turn."""
        before, after = chat.around(index)
        content_end = len(chat.text) - len(after)
        start = self._start(chat, index, before)
        if not chat.text.endswith(after) or content_end < start:
            raise AmbiguousTemplate(f"message {index} is not rendered as one piece")
        return start, content_end + self._ending_length(after, chat.ending(index))

    def _ending_length(self, after: str, alone: str) -> int:
        """How much of what stands after a message ends its turn: up to its first control token.

        ``alone`` stands there when nothing follows; what both begin with is the message's own, the rest of
        ``after`` is the next one's header.
        """
        control = self._control_tokens.search(_common_start(after, alone))
        if control is not None:
            return control.end()
        return len(alone) if after.startswith(alone) else 0

    def _start(self, chat: "_Conversation", index: int, before: str) -> int:
        """Where the model's own words begin: after the generation prompt, which ends the header."""
        prompt = chat.prompt(index)
        # It may be shorter than the header (the template writes an empty thought) or longer (it opens one),
        # but a template that ignores add_generation_prompt has no prompt at all.
        if (
            prompt is not None
            and prompt != before
            and chat.text.startswith(prompt)
            and prompt != chat.until(index)
        ):
            return len(prompt)
        if not chat.text.startswith(before):
            raise AmbiguousTemplate(f"what comes before message {index} depends on its content")
        return len(before)


class _Conversation:
    """One conversation, rendered whole and in the variants that tell its parts apart."""

    def __init__(
        self,
        source: str,
        tokenizer: PreTrainedTokenizerBase,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
    ) -> None:
        self._source = _FIXED_DATE + source if "strftime_now" in source else source
        self._variables = dict(tokenizer.special_tokens_map)
        self._messages = messages
        self._tools = tools
        try:
            self.text = self._render(messages)
        except _TEMPLATE_ERRORS as error:
            raise TemplateRefusal(f"is refused by the model's chat template: {error}") from error

    def around(self, index: int) -> tuple[str, str]:
        """What stands before and after message ``index``."""
        return self._split([*self._messages[:index], _marked(), *self._messages[index + 1 :]])

    def ending(self, index: int) -> str:
        """What stands after message ``index`` when it is the last."""
        return self._split([*self._messages[:index], _marked()])[1]

    def prompt(self, index: int) -> str | None:
        """What the model is given to write message ``index``; None where nothing comes before it."""
        if index == 0:
            return None
        try:
            return self._render(self._messages[:index], add_generation_prompt=True)
        except _TEMPLATE_ERRORS:
            return None

    def until(self, index: int) -> str:
        return self._render(self._messages[:index])

    def with_generation_spans(self) -> tuple[str, list[Span]]:
        return self._render_with_spans(self._messages, return_assistant_tokens_mask=True)

    def _split(self, messages: list[Message]) -> tuple[str, str]:
        try:
            parts = self._render(messages).split(_MARKER)
        except _TEMPLATE_ERRORS as error:
            raise AmbiguousTemplate(str(error)) from error
        if len(parts) != 2:
            raise AmbiguousTemplate(f"an assistant message is rendered {len(parts) - 1} times")
        return parts[0], parts[1]

    def _render(self, messages: list[Message], add_generation_prompt: bool = False) -> str:
        return self._render_with_spans(messages, add_generation_prompt=add_generation_prompt)[0]

    def _render_with_spans(self, messages: list[Message], **switches: bool) -> tuple[str, list[Span]]:
        arguments: dict[str, Any] = {
            **self._variables,
            "conversations": [messages],
            "tools": self._tools,
            "chat_template": self._source,
            **switches,
        }
        rendered: Any = render_jinja_template(**arguments)
        texts, spans = rendered
        return texts[0], [(start, end) for start, end in spans[0]] if spans else []


def _marked() -> Message:
    return {"role": "assistant", "content": _MARKER}


def _common_start(left: str, right: str) -> str:
    same = takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    return "".join(character for character, _ in same)


def _weighted(spans: list[Span], trained: list[bool]) -> tuple[Span, ...]:
    if all(trained):
        return tuple(spans)
    if len(spans) != len(trained):
        raise AmbiguousTemplate(
            f"{len(trained)} assistant messages with weights are rendered in {len(spans)} generation blocks"
        )
    return tuple(span for span, wanted in zip(spans, trained, strict=True) if wanted)


def _any_of(tokens: list[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) if tokens else r"(?!)")


def _for_template(example: ChatExample, source: str) -> list[Message]:
    """OpenAI's messages in the words of Hugging Face's templates."""
    if example.tools and "tools" not in source:
        raise TemplateRefusal("defines tools, and the model's chat template has no place for them")
    return [_message(message, source) for message in example.messages]


def _message(message: Message, source: str) -> Message:
    given = {key: value for key, value in message.items() if key not in ("weight", "function_call")}
    if message["role"] == "developer" and "developer" not in source:
        given["role"] = "system"
    if message["role"] == "function":
        given["role"] = "tool"
    calls = list(message.get("tool_calls", ()))
    if "function_call" in message:
        calls.append({"type": "function", "function": message["function_call"]})
    if calls:
        if "tool_calls" not in source:
            raise TemplateRefusal("calls a tool, and the model's chat template has no place for tool calls")
        given["tool_calls"] = [_call(call) for call in calls]
    return given


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """OpenAI writes a call's arguments as a string of JSON; templates expect the object.
    Text that is no proper JSON stays text."""
    function = dict(call["function"])
    if isinstance(function["arguments"], str):
        try:
            arguments = parse_json(function["arguments"].encode())
        except LineProblem:
            arguments = None
        if isinstance(arguments, dict):
            function["arguments"] = arguments
    return call | {"function": function}
