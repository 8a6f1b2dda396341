"""A chat template that also tells which message each part of its text is of.

The template's syntax tree gets marks: a loop over messages writes the message's number where its body
begins, what follows the loop writes the outer one's again, and a generation block writes where it begins
and ends. Optionally the messages' own fields are marked at both ends, inside their outer spaces, so that
trimming does not see it. One more rendering gives the marked text; without its marks it has to be the
text itself, else the marks have changed what the template does and the trace is refused. So a trace costs
one rendering however many messages there are, and is right for templates that look ahead or back.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.visitor import NodeTransformer
from transformers.utils.chat_template_utils import _compile_jinja_template

from zero_core.data.examples import Message

Span = tuple[int, int]
"""Characters [start, end) of the rendered text."""

TEMPLATE_ERRORS = (
    TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError,
)  # fmt: skip
"""What a template can raise: its own refusals and Jinja's, and Python's on a value of another shape."""

# A template may print today's date. A run that is resumed tomorrow must see the same tokens, so the date
# stands still: at the one that Llama's templates fall back to.
_NOW = datetime(2024, 7, 26)

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_PUSH, _ITEM, _SET, _POP = "_trace_push", "_trace_item", "_trace_set", "_trace_pop"
_BEGIN, _END = "_trace_begin", "_trace_end"
_FIELD_MARKS = (("content", "s", "e"), ("reasoning_content", "r", "f"), ("thinking", "r", "f"))
_PRIVATE_USE = range(0xF0000, 0xF1000)


@dataclass(frozen=True)
class Trace:
    text: str
    owners: list[tuple[int, int, int | None]] = field(default_factory=list)
    """[start, end) and the message whose turn of a loop wrote it: the whole text in order."""

    generated: list[Span] = field(default_factory=list)
    """What generation blocks wrote."""

    fields: list[tuple[int, int, int]] = field(default_factory=list)
    """[start, end) of a message's own content or reasoning, and the message."""

    said: frozenset[int] | None = None
    """Messages of whose content at least one end was written; None where fields were not marked."""

    def pieces(self, index: int) -> list[Span]:
        """What message ``index`` wrote, in order."""
        return self._by_owner.get(index, [])

    def text_of(self, index: int) -> str:
        return "".join(self.text[start:end] for start, end in self.pieces(index))

    def generated_by(self) -> Iterator[tuple[int, int, int | None]]:
        """``generated`` in order and without overlap, cut where another message goes on."""
        owners = iter(self.owners)
        end, owner, done = 0, None, 0
        for first, last in sorted(self.generated):
            at = max(first, done)
            while at < last:
                while end <= at:
                    _, end, owner = next(owners)
                yield at, min(end, last), owner
                at = done = min(end, last)

    @cached_property
    def _by_owner(self) -> dict[int | None, list[Span]]:
        grouped: dict[int | None, list[Span]] = {}
        for start, end, owner in self.owners:
            grouped.setdefault(owner, []).append((start, end))
        return grouped


class TracedTemplate:
    """One template, compiled once, in the sandbox of transformers."""

    def __init__(self, source: str) -> None:
        """Raises TemplateSyntaxError."""
        self._plain: Any = _compile_jinja_template(source)
        environment = self._plain.environment
        self._traced: Any = environment.from_string(_Instrument().visit(environment.parse(source)))
        self.source = source
        self.has_generation = _GENERATION.search(source) is not None

    def text(self, messages: list[Message], variables: Mapping[str, Any]) -> str:
        """Raises one of TEMPLATE_ERRORS."""
        return self._render(self._plain, messages, variables, {})

    def trace(
        self, messages: list[Message], variables: Mapping[str, Any], text: str, *, fields: bool
    ) -> Trace | None:
        """The trace of ``text``; None where the template does not take the marks."""
        marks = _Marks(text)
        marked = [marks.fields_of(i, m) if fields else dict(m) for i, m in enumerate(messages)]
        try:
            written = self._render(self._traced, marked, variables, _Tracker(marks, marked).functions())
        except TEMPLATE_ERRORS:
            return None
        trace = marks.read(written, fields)
        return trace if trace.text == text else None

    def _render(
        self, template: Any, messages: list[Message], variables: Mapping[str, Any], functions: dict[str, Any]
    ) -> str:
        given = {"documents": None, "add_generation_prompt": False, **variables, **functions}
        return str(template.render(**given, messages=messages, strftime_now=_NOW.strftime))


class _Marks:
    """Marks are two characters that the text does not have, with a letter and a number between them."""

    def __init__(self, text: str) -> None:
        free = (character for character in map(chr, _PRIVATE_USE) if character not in text)
        self._open, self._close = next(free), next(free)
        self._pattern = re.compile(f"{self._open}([a-z])([0-9]*){self._close}")

    def mark(self, letter: str, number: int | None = None) -> str:
        return f"{self._open}{letter}{'' if number is None else number}{self._close}"

    def fields_of(self, index: int, message: Message) -> Message:
        marked = dict(message)
        for key, start, end in _FIELD_MARKS:
            value = message.get(key)
            if isinstance(value, str) and (core := value.strip()):
                before, after = value.split(core, 1) if core != value else ("", "")
                marked[key] = before + self.mark(start, index) + core + self.mark(end, index) + after
        return marked

    def read(self, written: str, fields: bool) -> Trace:
        parts = self._pattern.split(written)
        texts: list[str] = []
        reader = _Reader(fields)
        for at in range(0, len(parts), 3):
            texts.append(parts[at])
            reader.advance(len(parts[at]))
            if at + 1 < len(parts):
                number = int(parts[at + 2]) if parts[at + 2] else None
                reader.take(parts[at + 1], number)
        return reader.trace("".join(texts))


class _Reader:
    def __init__(self, fields: bool) -> None:
        self._said: set[int] | None = set() if fields else None
        self._position = 0
        self._owner: int | None = None
        self._owners: list[tuple[int, int, int | None]] = []
        self._begun: list[int] = []
        self._generated: list[Span] = []
        self._open_fields: dict[int, int] = {}
        self._fields: list[tuple[int, int, int]] = []

    def advance(self, length: int) -> None:
        start, self._position = self._position, self._position + length
        if not length:
            return
        if self._owners and self._owners[-1][2] == self._owner:
            start = self._owners.pop()[0]
        self._owners.append((start, self._position, self._owner))

    def take(self, letter: str, number: int | None) -> None:
        match letter:
            case "a":
                self._owner = number
            case "g":
                self._begun.append(self._position)
            case "h" if self._begun:
                self._generated.append((self._begun.pop(), self._position))
            case "s" | "r" if number is not None:
                self._say(letter, number)
                self._open_fields[number] = self._position
            case "e" | "f" if number is not None:
                self._say(letter, number)
                start = self._open_fields.pop(number, None)
                if start is not None:
                    self._fields.append((start, self._position, number))

    def _say(self, letter: str, number: int) -> None:
        if self._said is not None and letter in "se":
            self._said.add(number)

    def trace(self, text: str) -> Trace:
        said = None if self._said is None else frozenset(self._said)
        return Trace(text, self._owners, self._generated, self._fields, said)


class _Tracker:
    """What the marked template calls: which message each running loop is at."""

    def __init__(self, marks: _Marks, messages: list[Message]) -> None:
        self._marks = marks
        self._messages = messages
        self._numbers = {id(message): index for index, message in enumerate(messages)}
        self._loops: list[int | None] = []

    def functions(self) -> dict[str, Any]:
        return {
            _PUSH: self._push,
            _ITEM: self._item,
            _SET: self._set,
            _POP: self._pop,
            _BEGIN: lambda: self._marks.mark("g"),
            _END: lambda: self._marks.mark("h"),
        }

    def _push(self) -> str:
        self._loops.append(None)
        return ""

    def _item(self, value: object) -> str:
        before, self._loops[-1] = self._loops[-1], self._numbers.get(id(value))
        return self._owner() if self._loops[-1] != before else ""

    def _set(self, value: object) -> str:
        """A loop over numbers is at the first message that its body gives a name to."""
        if not self._loops or self._loops[-1] is not None or id(value) not in self._numbers:
            return ""
        self._loops[-1] = self._numbers[id(value)]
        return self._owner()

    def _pop(self) -> str:
        return self._owner() if self._loops.pop() is not None else ""

    def _owner(self) -> str:
        """The innermost message: what a loop inside a message's turn writes of another is the other's."""
        return self._marks.mark("a", next((at for at in reversed(self._loops) if at is not None), None))


class _Instrument(NodeTransformer):
    """Puts calls of the tracker into a template. Loops that write nothing only look something up: left as
    they are, they cost no more than before."""

    def __init__(self) -> None:
        self._in_loop = False

    def visit_For(self, node: nodes.For) -> list[nodes.Node]:
        if not _writes(node):
            return [node]
        self._visit_inside(node, in_loop=True)
        if isinstance(node.target, nodes.Name):
            node.body.insert(0, _call(_ITEM, node.target.name))
        return [_call(_PUSH), node, _call(_POP)]

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self._visit_inside(node, in_loop=False)
        return node

    def visit_Assign(self, node: nodes.Assign) -> list[nodes.Node]:
        if self._in_loop and isinstance(node.target, nodes.Name):
            return [node, _call(_SET, node.target.name)]
        return [node]

    def _visit_inside(self, node: nodes.Node, in_loop: bool) -> None:
        outside, self._in_loop = self._in_loop, in_loop
        self.generic_visit(node)
        self._in_loop = outside

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        called = node.call.node
        if isinstance(called, nodes.ExtensionAttribute) and called.name == "_generation_support":
            node.body = [_call(_BEGIN), *node.body, _call(_END)]
        return node


def _writes(node: nodes.For) -> bool:
    for output in node.find_all(nodes.Output):
        for part in output.nodes:
            if not isinstance(part, nodes.TemplateData) or not part.data.isspace():
                return True
    return next(iter(node.find_all((nodes.CallBlock, nodes.FilterBlock))), None) is not None


def _call(function: str, *names: str) -> nodes.Output:
    arguments = [nodes.Name(name, "load") for name in names]
    call = nodes.Call(nodes.Name(function, "load"), arguments, [], None, None)
    output = nodes.Output([call])
    output.set_lineno(1)
    return output
