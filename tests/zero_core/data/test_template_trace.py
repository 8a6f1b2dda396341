"""How much is rendered, in characters and calls: what a conversation costs must follow its size."""

from typing import Any

import pytest

from tests.tiny_model import CHATML
from tests.zero_core.data import chat_templates as templates
from tests.zero_core.data.chat_templates import family
from zero_core.data.chat_template import ChatTemplate
from zero_core.data.examples import ChatExample, parse_example
from zero_core.data.template_trace import TracedTemplate


def conversation(turns: int, calls: bool) -> ChatExample:
    messages: list[dict[str, Any]] = []
    for number in range(turns):
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages += [
            {"role": "user", "content": f"question {number}"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "abcdefghi", "content": "so it is"},
            {"role": "assistant", "content": f"answer {number}"},
        ]
    if not calls:
        messages = [message for message in messages if message["content"] and message["role"] != "tool"]
    parsed = parse_example(1, {"messages": messages}, "chat")
    assert isinstance(parsed, ChatExample)
    return parsed


@pytest.mark.parametrize(
    ("template", "eos"),
    [
        (templates.MISTRAL, "</s>"),
        (templates.HERMES, "<|im_end|>"),
        (templates.CHANNELS, "<|return|>"),
        (templates.DEEPSEEK, "<eos>"),
        (CHATML, "<|im_end|>"),
    ],
)
def test_rendering_follows_the_size_of_a_conversation(
    template: str, eos: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not quicker on one machine: fewer than 8 times its own text, whether it has 10 turns or 200."""
    rendered: list[int] = []
    render = TracedTemplate._render

    def counted(self: TracedTemplate, *arguments: Any) -> str:
        text = render(self, *arguments)
        rendered.append(len(text))
        return text

    monkeypatch.setattr(TracedTemplate, "_render", counted)
    chats = ChatTemplate(family(template, eos=eos, bos="<s>"))
    counts = []
    for turns in (10, 10, 200):
        rendered.clear()
        text = chats.render(conversation(turns, template != CHATML)).text
        assert sum(rendered) < 8 * len(text)
        counts.append(len(rendered))
    assert counts[1] == counts[2] <= 12
