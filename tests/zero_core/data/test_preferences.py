"""OpenAI's preference files, and what API answers leave in any of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from zero_core.data.formats import ChatExample, PreferenceExample, read_examples, validate_file

USER = {"role": "user", "content": "q"}
GOOD = {"role": "assistant", "content": "good"}
BAD = {"role": "assistant", "content": "bad"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "r", "tool_call_id": "1"}
# What the openai SDK's ``message.model_dump()`` gives for an answer of vLLM.
ANSWERED = {
    "content": "good",
    "refusal": None,
    "role": "assistant",
    "annotations": [],
    "audio": None,
    "function_call": None,
    "tool_calls": [],
    "reasoning": None,
    "reasoning_content": None,
}


def write(path: Path, *values: Any) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def pair(chosen: Any = None, rejected: Any = None, **more: Any) -> dict[str, Any]:
    outputs = {"preferred_output": chosen or [GOOD], "non_preferred_output": rejected or [BAD]}
    return {"input": {"messages": [USER]}, **outputs, **more}


def test_a_pair_is_read(tmp_path: Path) -> None:
    asked = {"messages": [USER, CALLING, RESULT], "tools": [TOOL], "parallel_tool_calls": False}
    file = write(tmp_path / "f", {**pair([CALLING, RESULT, GOOD]), "input": asked})
    (example,) = read_examples(file)
    assert example == PreferenceExample(
        1,
        prompt=(USER, CALLING, RESULT),
        chosen=(CALLING, RESULT, GOOD),
        rejected=(BAD,),
        tools=(TOOL,),
    )
    assert validate_file(file).format == "preference"


def test_older_names_and_single_messages_are_the_same_pair(tmp_path: Path) -> None:
    asked = {"input": {"messages": [USER], "tools": [], "functions": []}}
    older = {**asked, "preferred_completion": [GOOD], "non_preferred_completion": [BAD]}
    single = {**asked, "preferred_output": GOOD, "non_preferred_output": BAD, "preferred_completion": None}
    first, second, third = read_examples(write(tmp_path / "f", pair(), older, single))
    for other in (second, third):
        assert isinstance(first, PreferenceExample)
        assert isinstance(other, PreferenceExample)
        assert (other.prompt, other.chosen, other.rejected) == (first.prompt, first.chosen, first.rejected)
        assert other.tools == ()


@pytest.mark.parametrize(
    ("value", "code", "words"),
    [
        (pair(input=None), "missing_field", "no input"),
        (pair(input="q"), "wrong_type", "a string in input"),
        (pair(input={"messages": []}), "empty_list", "input.messages"),
        (pair(input={"mesages": [USER]}), "unknown_key", "in input: did you mean messages?"),
        (pair(input={"messages": [USER], "tools": [{}]}), "missing_field", "input.tools[0].function"),
        (pair([GOOD, {"role": "assistant"}]), "missing_field", "preferred_output[1].content"),
        (pair([GOOD], [USER]), "unknown_role", "non_preferred_output[0].role 'user'"),
        (pair([CALLING, RESULT]), "no_assistant_message", "at the end of preferred_output"),
        (pair([{**GOOD, "weight": 0}]), "misplaced_key", "preferred_output[0].weight"),
        (pair(preferred_completion=[GOOD]), "unknown_key", "both preferred_output and preferred_completion"),
        (
            {"input": {"messages": [USER]}, "preferred_output": [GOOD]},
            "missing_field",
            "non_preferred_output",
        ),
        (
            {"input": {"messages": [USER]}, "preferred_output": [GOOD], "nonpreferred_output": [BAD]},
            "unknown_key",
            "did you mean non_preferred_output?",
        ),
    ],
)
def test_a_bad_pair_is_named(tmp_path: Path, value: Any, code: str, words: str) -> None:
    (error,) = validate_file(write(tmp_path / "f", value)).errors
    assert (error.line, error.code) == (1, code)
    assert words in error.message


def test_a_pair_of_equal_outputs_is_told(tmp_path: Path) -> None:
    report = validate_file(write(tmp_path / "f", pair(), pair([BAD]), pair([BAD])))
    assert report.error_count == 0
    assert report.warnings == (
        "both outputs are the same, so nothing can be learnt (2 lines, the first is 2)",
    )


def test_what_an_api_answer_leaves_empty_is_absent(tmp_path: Path) -> None:
    calling = ANSWERED | {"content": None, "tool_calls": [CALL]}
    chat = {"messages": [USER, ANSWERED, USER, calling], "tools": [], "functions": []}
    chat_example, preference = (
        next(iter(read_examples(write(tmp_path / "f", value)))) for value in (chat, pair([ANSWERED]))
    )
    assert isinstance(chat_example, ChatExample)
    assert chat_example.messages == (USER, GOOD, USER, CALLING)
    assert chat_example.tools == ()
    assert isinstance(preference, PreferenceExample)
    assert preference.chosen == (GOOD,)


def test_no_content_beside_a_call_is_not_empty_content(tmp_path: Path) -> None:
    absent = {key: value for key, value in CALLING.items() if key != "content"}
    messages = [USER, CALLING, absent, {**CALLING, "content": ""}, {**CALLING, "content": []}]
    (example,) = read_examples(write(tmp_path / "f", {"messages": messages}))
    assert isinstance(example, ChatExample)
    assert [message["content"] for message in example.messages[1:]] == [None, None, "", None]


@pytest.mark.parametrize("name", ["reasoning", "thinking", "reasoning_content"])
def test_reasoning_has_one_name(tmp_path: Path, name: str) -> None:
    answer = {**GOOD, name: "because"}
    (example,) = read_examples(write(tmp_path / "f", {"messages": [USER, answer]}))
    assert isinstance(example, ChatExample)
    assert example.messages[1] == {**GOOD, "reasoning_content": "because"}


def test_columns_that_no_format_has_are_counted(tmp_path: Path) -> None:
    chat = {"messages": [USER, {**GOOD, "annotations": [{"type": "url_citation"}]}]}
    prompts = {"prompt": "p", "prompt_id": "1", "tools": None, "topics": []}
    report = validate_file(
        write(tmp_path / "f", {**chat, "source": "x"}, {**chat, **prompts}, {**chat, "source": "y"})
    )
    assert (report.examples, report.error_count) == (3, 0)
    assert report.warnings == (
        "the column 'source' is not used (2 lines, the first is 1)",
        "the key 'annotations' of messages is not used (3 lines, the first is 1)",
        "the column 'prompt' is not used (line 2)",
        "the column 'prompt_id' is not used (line 2)",
    )


def test_kinds_of_warnings_are_bounded(tmp_path: Path) -> None:
    report = validate_file(write(tmp_path / "f", *({"text": "a", f"c{i}": 1} for i in range(50))))
    assert len(report.warnings) == 21
    assert report.warnings[-1] == "30 warnings more of other kinds"


def test_a_reason_is_said_once(tmp_path: Path) -> None:
    bad = {"messages": [USER, {**GOOD, "wieght": 0}]}
    report = validate_file(write(tmp_path / "f", bad, bad, {"text": ""}, {"messages": []}, *[bad] * 40))
    assert report.error_count == 44
    assert report.summary == (
        "line 1 has the unknown key 'wieght' in messages[1]: did you mean weight? (also lines 2, 5, 6, 7); "
        "line 3 is of the format text in a file of the format chat; "
        "line 4 has an empty list in messages; and 37 more"
    )
