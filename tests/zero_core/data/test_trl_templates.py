"""Against an independent reference: TRL ships the templates of many families, and beside each the same
template with its generation marks, put there by hand. What is learnt under the first has to be what is
marked in the second, but for what the marks are known to hold too much of: the line end after a turn's last
token, and for some families the header.
"""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import TemplateError

from tests.tiny_model import byte_tokenizer
from zero_core.data.chat_template import ChatTemplate, TemplateRefusal
from zero_core.data.examples import ChatExample, parse_example
from zero_core.data.template_settings import TemplateSettings

# Found without importing it, which takes seconds.
_DIRECTORY = Path(find_spec("trl").submodule_search_locations[0]) / "chat_templates"
_CONTROL = re.compile(r"<\|[^|<> ]+\|>|<｜[^｜]+｜>|</?(?:start|end)_of_turn>|<\|?turn\|?>|<\|?tool_\w+\|?>")
# Long templates of which the versions differ in nothing that counts here.
_LIKE_OTHERS = ("gemma4", "nemotron_3_5", "nemotron_3_super", "nemotron_3_ultra", "qwen3_6", "qwen3_8")
_HEADERS = {
    "deepseekv3": ["<｜Assistant｜>", "<｜tool▁outputs▁end｜>"],
    "gptoss": ["<|start|>assistant"],
    "qwen2_5": ["\n"],
}

_CALL = {
    "id": "abcdefgh1",
    "type": "function",
    "function": {"name": "look_up", "arguments": '{"word": "é <|x|>", "n": [1, 2]}'},
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks up",
        "parameters": {"type": "object", "properties": {"word": {"type": "string", "description": "It"}}},
    },
}


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


_PLAIN = [_user("q1"), _assistant("a1"), _user(" q2\n"), _assistant("a 2\n\nb")]
_THOUGHT = [_user("q1"), _assistant("a1", reasoning_content="hm\nhm")]
_CALLING = [
    _user("q1"),
    _assistant(None, tool_calls=[_CALL]),
    {"role": "tool", "tool_call_id": "abcdefgh1", "name": "look_up", "content": "r"},
    _assistant("done"),
]


def _example(messages: list[dict[str, Any]], tools: bool) -> ChatExample:
    offered = {"tools": [_TOOL]} if tools else {}
    parsed = parse_example(1, {"messages": messages, **offered}, "chat")
    assert isinstance(parsed, ChatExample)
    return parsed


def _learnt(source: str, control: list[str], stops: list[str], chat: ChatExample) -> tuple[str, list[str]]:
    tokenizer = byte_tokenizer(None)
    tokenizer.add_special_tokens({"additional_special_tokens": control})
    tokenizer.eos_token = stops[0]
    settings = TemplateSettings(source, stop_token_ids=frozenset(tokenizer.convert_tokens_to_ids(stops)))
    rendered = ChatTemplate(tokenizer, settings).render(chat)
    return rendered.text, [rendered.text[start:end] for start, end in rendered.targets]


@pytest.mark.parametrize(
    ("family", "stops", "messages"),
    [
        ("llama3", ["<|eot_id|>"], _PLAIN),
        ("gemma", ["<end_of_turn>"], _PLAIN),
        ("gemma3", ["<end_of_turn>"], _PLAIN),
        ("phi3", ["<|endoftext|>"], _PLAIN),
        ("phi3", ["<|endoftext|>", "<|end|>"], _PLAIN),
        ("cohere2", ["<|END_OF_TURN_TOKEN|>"], _PLAIN),
        ("lfm2_v2", ["<|im_end|>"], _PLAIN),
        ("qwen2_5", ["<|im_end|>"], _PLAIN),
        ("qwen2_5", ["<|im_end|>"], _CALLING),
        ("qwen3", ["<|im_end|>"], _THOUGHT),
        ("qwen3_instruct_2507", ["<|im_end|>"], _CALLING),
        ("qwen3_vl", ["<|im_end|>"], _CALLING),
        ("deepseekv3", ["<｜end▁of▁sentence｜>"], _PLAIN),
        ("deepseekv3", ["<｜end▁of▁sentence｜>"], _CALLING),
        ("gptoss", ["<|return|>", "<|call|>"], _PLAIN),
        ("gptoss", ["<|return|>", "<|call|>"], _THOUGHT),
        ("gptoss", ["<|return|>", "<|call|>"], _CALLING),
        ("diffusion_gemma", ["<turn|>"], _PLAIN),
        ("diffusion_gemma", ["<turn|>"], _THOUGHT),
        ("diffusion_gemma", ["<turn|>"], _CALLING),
    ],
)
def test_what_is_learnt_is_what_trl_marks(family: str, stops: list[str], messages: Any) -> None:
    original = (_DIRECTORY / f"{family}.jinja").read_text()
    marked = (_DIRECTORY / f"{family}_training.jinja").read_text()
    control = sorted({*_CONTROL.findall(original), *stops})
    chat = _example(messages, tools="tools" in original and messages is _CALLING)
    text, ours = _learnt(original, control, stops, chat)
    marked_text, theirs = _learnt(marked, control, stops, chat)
    assert text == marked_text
    assert ours == [_without_header(family, answer).rstrip("\n") for answer in theirs]


def _without_header(family: str, answer: str) -> str:
    for header in _HEADERS.get(family, ()):
        answer = answer.removeprefix(header)
    return answer


def test_a_call_and_an_answer_end_with_the_token_of_whom_they_ask() -> None:
    """GLM stops at the next header. TRL's marks hold it, and add one to the last answer."""
    control = ["<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "<|endoftext|>"]
    stops = ["<|endoftext|>", "<|user|>", "<|observation|>"]
    original, marked = ((_DIRECTORY / f"glm4moe{kind}.jinja").read_text() for kind in ("", "_training"))
    for messages in (_PLAIN, _CALLING):
        chat = _example(messages, tools=messages is _CALLING)
        _, ours = _learnt(original, control, stops, chat)
        _, theirs = _learnt(marked, control, stops, chat)
        assert [*ours[:-1], ours[-1] + "<|user|>"] == theirs


def test_what_is_learnt_begins_where_the_prompt_ends() -> None:
    """By the direct way, a rendering of the conversation so far for each answer, in TRL's families."""
    compared = set()
    for file in sorted(_DIRECTORY.glob("*.jinja")):
        source = file.read_text()
        if file.stem.endswith("_training") or file.stem.startswith(_LIKE_OTHERS):
            continue
        for messages in (_PLAIN, _CALLING):
            tokenizer = byte_tokenizer(source)
            tokenizer.add_special_tokens({"additional_special_tokens": sorted(set(_CONTROL.findall(source)))})
            try:
                rendered = ChatTemplate(tokenizer).render(_example(messages, tools=False))
            except TemplateRefusal:
                continue  # no calls, several systems, or content in parts
            answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
            given = [_as_objects(message) for message in messages]
            for index, (start, _) in zip(answers, rendered.targets, strict=True):
                prompt, before = (_applied(tokenizer, given[:index], wanted) for wanted in (True, False))
                if prompt and prompt != before and rendered.text.startswith(prompt):
                    assert start == len(prompt), (file.name, index)
                    compared.add((file.name, index, messages is _CALLING))
    assert len(compared) > 40


def _applied(tokenizer: Any, messages: list[dict[str, Any]], prompt: bool) -> str | None:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    except (TemplateError, TypeError):
        return None  # of null content or arguments that are objects


def _as_objects(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    function = _CALL["function"] | {"arguments": json.loads(_CALL["function"]["arguments"])}
    return message | {"tool_calls": [_CALL | {"function": function}]}
