"""What of an assistant's turn the model has to write itself, no more and no less.

It begins after the header, which the model is given, and ends with what it must write to stop: a token at
which it stops, often after another closing token. Where a template closes a turn with the next one's
header, that is the header's first token, if the model stops at it.
"""

import re
from bisect import bisect_left
from dataclasses import dataclass

from zero_core.data.control_tokens import ControlTokens
from zero_core.data.headers import Headers
from zero_core.data.notes import Note
from zero_core.data.template_trace import Span, Trace


@dataclass(frozen=True)
class Turn:
    spans: list[Span]
    note: Note | None
    """What is odd about its end."""


class Turns:
    """The turns of one rendered conversation."""

    def __init__(self, trace: Trace, headers: Headers, tokens: ControlTokens, messages: int) -> None:
        self._trace = trace
        self._headers = headers
        self._tokens = tokens
        self._last = messages - 1
        self._fields = sorted(trace.fields)

    def turn(self, index: int) -> Turn | None:
        """None where message ``index`` is not written."""
        text = self._trace.text
        pieces = [(start, end) for start, end in self._trace.pieces(index) if text[start:end].strip()]
        if not pieces:
            return None
        start, end = pieces[0]
        limit = next((own for own, _, owner in self._fields_in(start, end) if owner == index), end)
        pieces[0] = self._headers.end(text, index, start, limit, self._tokens), end
        spans = [
            self._ended(index, piece, position == len(pieces) - 1) for position, piece in enumerate(pieces)
        ]
        note = end_note(text, spans[-1], self._tokens)
        return Turn([own for span in spans for own in self._without_others(index, span)], note)

    def _ended(self, index: int, piece: Span, final: bool) -> Span:
        """``piece`` up to where the model stops, which may be beyond it."""
        text, tokens = self._trace.text, self._tokens
        start, end = piece
        own_end = max((end for _, end, owner in self._fields_in(*piece) if owner == index), default=start)
        closing = tokens.between(text, own_end, end)
        if own_end == start:
            closing = _trailing(text, closing, end)
        closing = [found for found in closing if not tokens.is_bos(found[0])]
        stops = [found for found in closing if tokens.is_stop(found[0])]
        if not stops or (final and index == self._last):
            beyond = tokens.stop_after(text, stops[-1].end() if stops else end)
            if beyond is not None:
                return start, beyond
        if not final:
            return piece
        last = (stops or closing)[-1:]
        return start, last[0].end() if last else end

    def _fields_in(self, start: int, end: int) -> list[tuple[int, int, int]]:
        first = bisect_left(self._fields, (start,))
        return self._fields[first : bisect_left(self._fields, (end,))]

    def _without_others(self, index: int, span: Span) -> list[Span]:
        """``span`` without what it has of another message's own text."""
        start, end = span
        kept = []
        for other_start, other_end, owner in self._fields_in(start, end):
            if owner != index:
                kept.append((start, other_start))
                start = max(start, other_end)
        return [(start, end) for start, end in [*kept, (start, end)] if start < end]


def end_note(text: str, span: Span, tokens: ControlTokens) -> Note | None:
    """What is odd about the end of what is learnt; spaces after its last token don't count."""
    found = _trailing(text, tokens.between(text, *span), span[1])
    if not found:
        return Note.END_NOT_LEARNT
    return None if any(tokens.is_stop(token[0]) for token in found) else Note.END_IS_NO_STOP


def _trailing(text: str, found: list[re.Match[str]], end: int) -> list[re.Match[str]]:
    """The last of ``found`` that have nothing but spaces between them and up to ``end``."""
    first = len(found)
    while first and not text[found[first - 1].end() : end].strip():
        first -= 1
        end = found[first].start()
    return found[first:]
