import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_model import CHATML, byte_tokenizer
from zero_core.data.chat_template import AmbiguousTemplate, ChatTemplate, TemplateRefusal
from zero_core.data.examples import ChatExample, parse_example
from zero_core.data.notes import Note
from zero_core.data.template_settings import TemplateSettings, stop_token_ids

# The shapes of well-known templates, cut to what matters here.
SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are SmolLM<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = (
    "{%- set ns = namespace(last=0) %}"
    "{%- for m in messages if m.role == 'user' %}{%- set ns.last = messages.index(m) %}{%- endfor %}"
    "{%- if tools %}{{- '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}"
    "{%- set content = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{%- set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in m.content else '' %}"
    "{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}"
    "{{- content }}"
    "{%- for call in m.tool_calls or [] %}"
    "{{- '<tool_call>' + call.function.name + ' ' + call.function.arguments | tojson + '</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
INSTRUCT = (
    "{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
PLAIN = "{% for m in messages %}### {{ m.role }}: {{ m.content }}\n\n{% endfor %}"
END_ONLY_AT_THE_END = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}"
    "{% if loop.last %}{{ eos_token }}{% endif %}{% endfor %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)


def example(*messages: dict[str, Any], **more: Any) -> ChatExample:
    parsed = parse_example(7, {"messages": list(messages), **more}, "chat")
    assert isinstance(parsed, ChatExample)
    return parsed


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def learnt(template: str | None, chat: ChatExample) -> list[str]:
    rendered = ChatTemplate(byte_tokenizer(template)).render(chat)
    return [rendered.text[start:end] for start, end in rendered.targets]


TWO_TURNS = example(user("q1"), assistant("a1"), user("q2"), assistant(" a2 "))


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["a1<|im_end|>", " a2 <|im_end|>"]),
        (SMOLLM, ["a1<|im_end|>", " a2 <|im_end|>"]),
        (None, ["a1<|im_end|>", " a2 <|im_end|>"]),
        (THINKING, ["a1<|im_end|>", "<think>\n\n</think>\n\n a2 <|im_end|>"]),
        (INSTRUCT, [" a1 <|im_end|>", " a2 <|im_end|>"]),
        (PLAIN, ["a1\n\n", " a2 \n\n"]),
        (END_ONLY_AT_THE_END, ["a1", " a2 <|im_end|>"]),
        (MARKED, ["a1<|im_end|>", " a2 <|im_end|>"]),
    ],
)
def test_each_answer_is_learnt_with_the_end_of_its_turn(template: str | None, expected: list[str]) -> None:
    assert learnt(template, TWO_TURNS) == expected


@pytest.mark.parametrize("template", [CHATML, SMOLLM, None, INSTRUCT, MARKED])
def test_weight_0_is_not_learnt(template: str | None) -> None:
    chat = example(user("q1"), assistant("a1", weight=0), user("q2"), assistant("a2", weight=1))
    assert [text.split("<")[0].strip() for text in learnt(template, chat)] == ["a2"]


@pytest.mark.parametrize("template", [CHATML, SMOLLM, None, MARKED])
def test_answers_that_repeat_each_other_or_the_question(template: str | None) -> None:
    chat = example(
        assistant("x", weight=0),
        user("x<|im_end|>"),
        assistant("x"),
        assistant(""),
        user("x"),
        assistant("xx"),
    )
    assert learnt(template, chat) == ["x<|im_end|>", "<|im_end|>", "xx<|im_end|>"]


def test_a_thought_is_learnt_where_the_template_shows_it() -> None:
    thought = "<think>\nhm\n</think>\n\n"
    chat = example(user("q1"), assistant(thought + "a1"), user("q2"), assistant(thought + "a2"))
    assert learnt(THINKING, chat) == ["a1<|im_end|>", thought + "a2<|im_end|>"]


def test_a_tool_call_is_learnt() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    chat = example(
        user("q"),
        assistant(None, tool_calls=[call]),
        {"role": "tool", "content": "r", "tool_call_id": "1"},
        assistant("done"),
        tools=[{"type": "function", "function": {"name": "f"}}],
    )
    assert learnt(THINKING, chat) == [
        '<think>\n\n</think>\n\n<tool_call>f {"a": 1}</tool_call><|im_end|>',
        "<think>\n\n</think>\n\ndone<|im_end|>",
    ]
    older = example(user("q"), assistant(None, function_call=call["function"]), user("q2"), assistant("done"))
    assert learnt(THINKING, older)[0] == '<tool_call>f {"a": 1}</tool_call><|im_end|>'


@pytest.mark.parametrize("arguments", ["{", "[1]", "[" * 500 + "]" * 500, '{"a": "\\ud800"}', "NaN"])
def test_arguments_that_are_no_proper_object_stay_text(arguments: str) -> None:
    call = {"name": "f", "arguments": arguments}
    (text,) = learnt(THINKING, example(user("q"), assistant(None, function_call=call)))
    assert text.endswith(f"<tool_call>f {json.dumps(arguments)}</tool_call><|im_end|>")


@pytest.mark.parametrize(
    ("chat", "words"),
    [
        (
            example(user("q"), assistant(None, function_call={"name": "f", "arguments": "{}"})),
            "no place for tool calls",
        ),
        (
            example(user("q"), assistant("a"), tools=[{"type": "function", "function": {"name": "f"}}]),
            "no place for them",
        ),
    ],
)
def test_what_a_template_would_drop_is_refused(chat: ChatExample, words: str) -> None:
    with pytest.raises(TemplateRefusal, match=words):
        learnt(CHATML, chat)


def test_a_template_that_raises_refuses_the_example() -> None:
    with pytest.raises(TemplateRefusal, match="roles must alternate"):
        learnt(INSTRUCT, example(user("q"), user("q"), assistant("a")))
    with pytest.raises(TemplateRefusal, match="refused by the model's chat template"):
        learnt("{{ messages[0].content + 1 }}", TWO_TURNS)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}",
            "message 1 is not written by a loop",
        ),
        ("{{ messages }}", "message 1 is not written by a loop"),
        ("{{ messages[0].content + messages[1].content }}", "message 1 is not written by a loop"),
        (
            "{% set text %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ text | upper }}",
            "works on its own output",
        ),
        ("{% for m in messages %}{% generation %}{% endgeneration %}{% endfor %}", "no generation block"),
    ],
)
def test_an_ambiguous_template_is_refused(template: str, words: str) -> None:
    with pytest.raises(AmbiguousTemplate, match=words):
        learnt(template, example(user("q"), assistant("a")))


def test_weights_cut_a_block_of_several_answers() -> None:
    one_block = "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
    chat = example(assistant("a", weight=0), assistant("b"))
    assert learnt(one_block, chat) == ["b"]
    outside = "{% for m in messages %}{{ m.role }}{% endfor %}{% generation %}!{% endgeneration %}"
    with pytest.raises(AmbiguousTemplate, match="some are not to be learnt"):
        learnt(outside, chat)
    assert learnt(outside, example(user("q"), assistant("b"))) == ["!"]


def test_marks_of_the_template_are_honoured_as_they_are() -> None:
    chat = example(user("q"), assistant("a"))
    odd = MARKED.replace(
        "{{ m.content + '<|im_end|>' }}{% endgeneration %}", "{{ m.content }}{% endgeneration %}!"
    )
    rendered = ChatTemplate(byte_tokenizer(odd)).render(chat)
    assert [rendered.text[start:end] for start, end in rendered.targets] == ["a"]
    assert rendered.notes == (Note.END_NOT_LEARNT,)
    assert ChatTemplate(byte_tokenizer(MARKED)).render(chat).notes == ()


def test_words_that_the_marks_use_are_ordinary_in_a_conversation() -> None:
    odd = "".join(map(chr, range(0xF0000, 0xF0010))) + "MARKEDANSWER a0"
    assert learnt(CHATML, example(user(odd), assistant(odd))) == [odd + "<|im_end|>"]


def test_settings_of_a_job() -> None:
    template = "{{ name }} {{ eos_token }}\n" + CHATML
    settings = TemplateSettings(template, {"name": {"a": [1, True]}}, "last")
    rendered = ChatTemplate(byte_tokenizer("unused"), settings).render(TWO_TURNS)
    assert rendered.text.startswith("{'a': [1, True]} <|im_end|>\n<|im_start|>user")
    assert [rendered.text[start:end] for start, end in rendered.targets] == [" a2 <|im_end|>"]
    weighted = example(user("q1"), assistant("a1"), assistant("a2", weight=0))
    rendered = ChatTemplate(byte_tokenizer(), TemplateSettings(train_on="last")).render(weighted)
    assert [rendered.text[start:end] for start, end in rendered.targets] == ["a1<|im_end|>"]


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"messages": []}, "'messages' is set by the conversation"),
        ({"x": object()}, "not JSON serializable"),
        ({"x": float("nan")}, "Out of range float"),
    ],
)
def test_variables_of_a_template_are_plain(kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"chat_template_kwargs: .*{words}"):
        TemplateSettings(kwargs=kwargs)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''['__class__'].mro }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ strftime_now.__self__.year }}",
        "{{ kind.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_template_stays_in_its_sandbox(template: str) -> None:
    settings = TemplateSettings(template + CHATML, {"kind": "x"})
    with pytest.raises(TemplateRefusal, match=r"unsafe|Range too big"):
        ChatTemplate(byte_tokenizer(), settings).render(TWO_TURNS)


def test_a_template_that_does_not_parse_is_the_models_fault() -> None:
    with pytest.raises(AmbiguousTemplate, match="no valid Jinja template: line 2: Unexpected end"):
        learnt("\n{% for m in messages %}", TWO_TURNS)


def test_a_template_that_looks_at_how_content_begins() -> None:
    """Marks in the content would change what it does: it is traced without them."""
    looking = CHATML.replace(
        "message['content'] +", "(message['content'] if message['content'].startswith('q') else '?') +"
    )
    chat = example(user("q"), assistant("quite"), user("why"), assistant("a"))
    rendered = ChatTemplate(byte_tokenizer(looking)).render(chat)
    assert [rendered.text[start:end] for start, end in rendered.targets] == ["quite<|im_end|>", "?<|im_end|>"]
    assert rendered.notes == (Note.CONTENT_LEFT_OUT,)


def test_content_that_the_template_rewrites_is_not_left_out() -> None:
    rewriting = CHATML.replace("message['content'] +", "message['content'].replace('/no_think', '') +")
    chat = example(user("q /no_think now"), assistant("a"))
    rendered = ChatTemplate(byte_tokenizer(rewriting)).render(chat)
    assert "q  now" in rendered.text
    assert rendered.notes == ()


def test_of_several_templates_the_one_for_tools_is_used() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": CHATML, "tool_use": CHATML.replace("<|im_end|>", "{{ tools }}")}
    chat = example(user("q"), assistant("a"), tools=[{"type": "function", "function": {"name": "f"}}])
    assert "{{ tools }}" in ChatTemplate(tokenizer).render(chat).text
    tokenizer.chat_template = {"rag": CHATML}
    with pytest.raises(AmbiguousTemplate, match="chat template"):
        ChatTemplate(tokenizer).render(example(user("q"), assistant("a")))


def test_a_stop_that_the_tokenizer_lacks() -> None:
    settings = TemplateSettings(stop_token_ids=frozenset({10**6}))
    assert ChatTemplate(byte_tokenizer(), settings).render(TWO_TURNS).notes == ()


def test_stops_are_those_of_the_generation_config(tmp_path: Path) -> None:
    assert stop_token_ids(tmp_path) == frozenset()
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    assert stop_token_ids(tmp_path) == {3}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert stop_token_ids(tmp_path) == {1, 2}


def test_developer_is_system_where_the_template_does_not_know_it() -> None:
    chat = example({"role": "developer", "content": "d"}, user("q"), assistant("a"))
    assert ChatTemplate(byte_tokenizer()).render(chat).text.startswith("<|im_start|>system\nd")
    knows = CHATML + "{# developer #}"
    assert ChatTemplate(byte_tokenizer(knows)).render(chat).text.startswith("<|im_start|>developer\nd")


def test_the_date_in_a_template_stands_still() -> None:
    dated = "{{ strftime_now('%d %B %Y') }}\n" + PLAIN
    rendered = ChatTemplate(byte_tokenizer(dated)).render(TWO_TURNS)
    assert rendered.text.startswith("26 July 2024\n### user")
