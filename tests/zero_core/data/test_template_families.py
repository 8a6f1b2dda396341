"""What is learnt under templates of other structures than ChatML's, with what can't be said in notes."""

import json
from typing import Any

import pytest

from tests.zero_core.data import chat_templates as templates
from tests.zero_core.data.chat_templates import family, stopping_at
from zero_core.data.chat_template import ChatTemplate, RenderedChat, TemplateRefusal
from zero_core.data.examples import ChatExample, parse_example
from zero_core.data.notes import Note
from zero_core.data.template_settings import TemplateSettings

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]


def chat(*messages: dict[str, Any], **more: Any) -> ChatExample:
    parsed = parse_example(1, {"messages": list(messages), **more}, "chat")
    assert isinstance(parsed, ChatExample)
    return parsed


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(number: int = 1, arguments: str = '{"word": "é", "n": 1}') -> dict[str, Any]:
    return {
        "id": f"id5678{number:03}",
        "type": "function",
        "function": {"name": "look_up", "arguments": arguments},
    }


def result(content: str, number: int = 1) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"id5678{number:03}", "content": content}


def pieces(rendered: RenderedChat) -> list[str]:
    return [rendered.text[start:end] for start, end in rendered.targets]


TOOL_CHAT = chat(user("q"), assistant(None, tool_calls=[call()]), result("r"), assistant("done"), tools=TOOLS)


def test_calls_of_mistral_with_ids_of_9_characters() -> None:
    tokenizer = family(templates.MISTRAL, eos="</s>", bos="<s>")
    rendered = ChatTemplate(tokenizer).render(TOOL_CHAT)
    written = '[CALLS] [{"name": "look_up", "arguments": {"word": "é", "n": 1}, "id": "id5678001"}]</s>'
    # The prompt ends with [/INST]: a space before the answer is the model's to write.
    assert pieces(rendered) == [written, " done</s>"]
    assert rendered.text == (
        f"<s>[TOOLS]{json.dumps(TOOLS)}[/TOOLS][INST] q[/INST]{written}[RESULT] r id5678001[/RESULT] done</s>"
    )
    assert rendered.notes == ()
    with pytest.raises(TemplateRefusal, match="9 characters"):
        ChatTemplate(tokenizer).render(chat(user("q"), assistant(None, tool_calls=[call() | {"id": "1"}])))


def test_channels_are_the_models_to_choose() -> None:
    tokenizer = family(templates.CHANNELS, "<|call|>", eos="<|return|>")
    template = ChatTemplate(tokenizer, stopping_at(tokenizer, "<|call|>"))
    rendered = template.render(TOOL_CHAT)
    assert pieces(rendered) == [
        ' to=look_up<|channel|>commentary<|message|>{"word": "é", "n": 1}<|call|>',
        "<|channel|>final<|message|>done<|return|>",
    ]
    assert rendered.notes == ()
    thought = chat(user("q"), assistant("a"), user("q"), assistant("b", reasoning_content="hm"))
    rendered = template.render(thought)
    # An answer that is not the last ends with <|end|>, at which this model does not stop.
    assert pieces(rendered) == [
        "<|channel|>final<|message|>a<|end|>",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>",
    ]
    assert rendered.notes == (Note.END_IS_NO_STOP,)
    early = chat(user("q"), assistant("a", reasoning_content="hm"), user("q"), assistant("b"))
    assert Note.REASONING_LEFT_OUT in template.render(early).notes
    last = ChatTemplate(tokenizer, TemplateSettings(train_on="last")).render(early)
    assert pieces(last) == ["<|channel|>final<|message|>b<|return|>"]
    assert last.notes == ()


def test_one_call_a_turn_and_no_text_beside_it() -> None:
    tokenizer = family(templates.LLAMA_TOOLS, eos="<|eot|>")
    template = ChatTemplate(tokenizer)
    rendered = template.render(TOOL_CHAT)
    assert pieces(rendered) == [
        '{"name": "look_up", "parameters": {"word": "é", "n": 1}}<|eot|>',
        "done<|eot|>",
    ]
    assert rendered.notes == ()
    beside = chat(user("q"), assistant("let me see", tool_calls=[call()]))
    assert template.render(beside).notes == (Note.TEXT_BESIDE_CALL_LEFT_OUT,)
    with pytest.raises(TemplateRefusal, match="single tool-calls only"):
        template.render(chat(user("q"), assistant(None, tool_calls=[call(1), call(2)])))


def test_a_call_without_its_name_is_refused() -> None:
    silent = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.tool_calls %} (called){% endif %}\n"
        "{% endfor %}"
    )
    with pytest.raises(TemplateRefusal, match=r"calls look_up, .* leaves the call out"):
        ChatTemplate(family(silent, eos="<eos>")).render(chat(user("q"), assistant("", tool_calls=[call()])))


def test_null_content_and_arguments_as_text() -> None:
    tokenizer = family(templates.DEEPSEEK, eos="<eos>", bos="<bos>")
    rendered = ChatTemplate(tokenizer).render(
        chat(user("q"), assistant(None, tool_calls=[call()]), result("r"), assistant("done"), user("q2"),
             assistant("<think>\nhm\n</think>x"))
    )  # fmt: skip
    # After a result the template gives <results/> as the prompt; a thought is opened for the model.
    assert pieces(rendered) == [
        '<calls>function<sep>look_up\n{"word": "é", "n": 1}</calls><eos>',
        "done<eos>",
        "x<eos>",
    ]
    assert rendered.notes == (Note.REASONING_LEFT_OUT,)
    with pytest.raises(TemplateRefusal, match="leaves the call out"):
        ChatTemplate(tokenizer).render(chat(user("q"), assistant("see:", tool_calls=[call()])))


def test_null_is_not_written_as_a_word() -> None:
    naive = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments }})"
        "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    tokenizer = family(naive, eos="<|im_end|>")
    rendered = ChatTemplate(tokenizer).render(
        chat(user("None"), assistant(None, tool_calls=[call(arguments='{"a":  [1]}')]))
    )
    # Neither Python's None nor its {'a': [1]}: the string of the file, to its spaces.
    assert pieces(rendered) == ['look_up({"a":  [1]})<|im_end|>']


def test_answers_of_tools_inside_a_turn_are_not_learnt() -> None:
    tokenizer = family(templates.ANSWERS_INSIDE, eos="</turn>")
    inside = chat(
        user("q"), assistant("so be it", tool_calls=[call()]), result("r1"), user("q2"), assistant("x")
    )
    rendered = ChatTemplate(tokenizer).render(inside)
    assert pieces(rendered) == ["<call>look_up</call>", "so be it</turn>", "x</turn>"]
    # A model that stops to be answered learns the token at which it does.
    stopping = ChatTemplate(tokenizer, stopping_at(tokenizer, "<result>")).render(inside)
    assert pieces(stopping)[0] == "<call>look_up</call><result>"


def test_another_message_quoted_inside_a_turn_is_not_learnt() -> None:
    quoting = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% if m.role == 'assistant' %}{{ 'To ' + messages[loop.index0 - 1].content + ': ' }}{% endif %}"
        "{{ m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    rendered = ChatTemplate(family(quoting, eos="<|im_end|>")).render(chat(user("why"), assistant("so")))
    assert pieces(rendered) == ["To ", ": so<|im_end|>"]


def test_several_calls_and_results_of_hermes() -> None:
    tokenizer = family(templates.HERMES, eos="<|im_end|>")
    rendered = ChatTemplate(tokenizer).render(
        chat(user("q"), assistant("both", tool_calls=[call(1), call(2, "{}")]), result("r1"), result("r2", 2),
             assistant("done"), tools=TOOLS)
    )  # fmt: skip
    first = '{"name": "look_up", "arguments": {"word": "é", "n": 1}}'
    second = '{"name": "look_up", "arguments": {}}'
    assert pieces(rendered) == [
        f"both\n<tool_call>\n{first}\n</tool_call>\n<tool_call>\n{second}\n</tool_call><|im_end|>",
        "done<|im_end|>",
    ]
    assert rendered.notes == ()


def test_the_next_header_is_the_end_where_the_model_stops_at_it() -> None:
    tokenizer = family(templates.NEXT_HEADER, "<|user|>", "<|assistant|>", eos="<|endoftext|>")
    two = chat(user("q"), assistant("a"), user("q2"), assistant("b"))
    rendered = ChatTemplate(tokenizer, stopping_at(tokenizer, "<|user|>")).render(two)
    assert pieces(rendered) == ["a<|user|>", "b"]
    assert rendered.notes == (Note.END_NOT_LEARNT,)
    assert pieces(ChatTemplate(tokenizer).render(two)) == ["a", "b"]


def test_an_end_that_is_missing_is_told() -> None:
    tokenizer = family(templates.CHATML_WITHOUT_END, eos="<|im_end|>")
    rendered = ChatTemplate(tokenizer).render(chat(user("q"), assistant("a<|im_end|>b")))
    assert pieces(rendered) == ["a<|im_end|>b\n"]
    assert rendered.notes == (Note.END_NOT_LEARNT,)


def test_every_token_of_the_end_is_learnt() -> None:
    chat_example = chat(user("q"), assistant("a"), user("q2"), assistant("b"))
    gemma = family(templates.GEMMA, eos="<eos>", bos="<bos>")
    rendered = ChatTemplate(gemma, stopping_at(gemma, "</turn>")).render(chat_example)
    assert (pieces(rendered), rendered.notes) == (["a</turn>", "b</turn>"], ())
    # The same model without its generation config would not stop there.
    assert ChatTemplate(gemma).render(chat_example).notes == (Note.END_IS_NO_STOP,)
    twice = templates.GEMMA.replace("</turn>\n", "</turn>\n<eos>")
    rendered = ChatTemplate(family(twice, eos="<eos>")).render(chat_example)
    assert (pieces(rendered), rendered.notes) == (["a</turn>\n<eos>", "b</turn>\n<eos>"], ())
    # Phi 3 writes it once, after the whole conversation.
    once = templates.GEMMA + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    phi = family(once, eos="<eos>", bos="<bos>")
    assert pieces(ChatTemplate(phi).render(chat_example)) == ["a</turn>", "b</turn>\n<eos>"]


def test_a_begin_after_the_end_is_not_learnt() -> None:
    chained = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
        "{% else %}{{ m.content + '</s><s>' }}{% endif %}{% endfor %}"
    )
    tokenizer = family(chained, eos="</s>", bos="<s>")
    assert pieces(ChatTemplate(tokenizer).render(chat(user("q"), assistant("a")))) == ["a</s>"]
    assert pieces(ChatTemplate(tokenizer).render(chat(user("q"), assistant("")))) == ["</s>"]
    other = family(chained.replace("</s>", "<|end|>"), eos="</s>", bos="<s>")
    assert pieces(ChatTemplate(other).render(chat(user("q"), assistant("a")))) == ["a<|end|>"]


def test_a_loop_over_numbers_is_followed() -> None:
    numbered = (
        "{% for i in range(messages | length) %}{% set m = messages[i] %}"
        "{% set next = messages[i + 1] if i + 1 < messages | length else none %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% if next %}{{ '\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '\n<|im_start|>assistant\n' }}{% endif %}"
    )
    rendered = ChatTemplate(family(numbered, eos="<|im_end|>")).render(
        chat(user("q"), assistant("a"), user("q2"), assistant("b"))
    )
    assert pieces(rendered) == ["a<|im_end|>", "b<|im_end|>"]
    # A thought that the prompt opens is not the model's to open, wherever the line end was written.
    thinking = numbered.replace("\n<|im_start|>assistant\n'", "\n<|im_start|>assistant\n<think>'")
    rendered = ChatTemplate(family(thinking, eos="<|im_end|>")).render(chat(user("q"), assistant("<think>a")))
    assert pieces(rendered) == ["a<|im_end|>"]


def test_macros_and_loops_that_are_left_early() -> None:
    macro = (
        "{% macro turn(m) %}{{ '<|im_start|>' + m.role + '\n' }}"
        "{% for part in [m.content, 'never'] %}{% if loop.index == 2 %}{% break %}{% endif %}{{ part }}"
        "{% endfor %}{{ '<|im_end|>\n' }}{% endmacro %}"
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ turn(m) }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    rendered = ChatTemplate(family(macro, eos="<|im_end|>")).render(
        chat({"role": "system", "content": "Be brief."}, user("q"), assistant("a"))
    )
    assert pieces(rendered) == ["a<|im_end|>"]
    assert rendered.notes == (Note.CONTENT_LEFT_OUT,)
