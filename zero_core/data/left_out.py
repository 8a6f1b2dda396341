"""What a chat template leaves out of a conversation."""

import json
import re
from collections.abc import Sequence

from zero_core.data.examples import Message
from zero_core.data.notes import Note
from zero_core.data.template_messages import call_names
from zero_core.data.template_trace import Trace

_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)


def left_out(messages: Sequence[Message], trained: Sequence[bool], trace: Trace) -> set[Note]:
    notes = set()
    for index, message in enumerate(messages):
        written = _Written(trace, index, message["role"])
        content = message.get("content") or ""
        thoughts = _THOUGHT.findall(content) if message["role"] == "assistant" else []
        if trained[index]:
            thoughts.append(message.get("reasoning_content", ""))
            if not all(map(written.has, thoughts)):
                notes.add(Note.REASONING_LEFT_OUT)
        said = content.rpartition("</think>")[2] if message["role"] == "assistant" else content
        if said.strip() and not (written.has(said) if trace.said is None else index in trace.said):
            notes.add(Note.TEXT_BESIDE_CALL_LEFT_OUT if call_names(message) else Note.CONTENT_LEFT_OUT)
    return notes


class _Written:
    """The text of one message's turn; for messages that templates move, such as the system's, all of it."""

    def __init__(self, trace: Trace, index: int, role: str) -> None:
        own = trace.text_of(index)
        self._texts = [own] if role == "assistant" and own.strip() else [own, trace.text]

    def has(self, words: str) -> bool:
        words = words.strip()
        forms = (words, json.dumps(words, ensure_ascii=False)[1:-1])
        return any(form in text for text in self._texts for form in forms)
