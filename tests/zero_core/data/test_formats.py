import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_model import write_chat_file
from zero_core.data import lines
from zero_core.data.formats import (
    ChatExample,
    CompletionExample,
    InvalidFile,
    TextExample,
    read_examples,
    validate_file,
)

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
CHAT = {"messages": [USER, ANSWER]}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def write(path: Path, *values: Any) -> Path:
    """Bytes are written as they are, anything else as JSON."""
    raw = [value if isinstance(value, bytes) else json.dumps(value).encode() for value in values]
    path.write_bytes(b"\n".join(raw) + b"\n")
    return path


def test_formats_loads_no_torch() -> None:
    code = (
        "import sys, zero_core.data.formats; "
        "sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_chat_is_read(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    file = write(
        tmp_path / "f",
        {
            "messages": [
                {"role": "developer", "content": "d"},
                {**USER, "name": "Ann"},
                {"role": "assistant", "content": None, "tool_calls": [CALL], "weight": 0},
                {"role": "tool", "content": "r", "tool_call_id": "1"},
                {"role": "assistant", "content": parts, "refusal": None},
            ],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "parallel_tool_calls": True,
        },
    )
    (example,) = read_examples(file)
    assert isinstance(example, ChatExample)
    assert [message["content"] for message in example.messages] == ["d", "q", None, "r", "ab"]
    assert example.trained == (False, False, False, False, True)
    assert example.tools == ({"type": "function", "function": {"name": "f"}},)
    assert all(
        message[key] is not None for message in example.messages for key in message.keys() - {"content"}
    )
    assert all("refusal" not in message for message in example.messages)


def test_completion_and_text_are_read(tmp_path: Path) -> None:
    completion = write(tmp_path / "c", {"prompt": "", "completion": "x"})
    text = write(tmp_path / "t", {"text": "héllo"}, {"text": "y"})
    assert list(read_examples(completion)) == [CompletionExample(1, "", "x")]
    assert list(read_examples(text)) == [TextExample(1, "héllo"), TextExample(2, "y")]
    assert validate_file(text).format == "text"
    assert validate_file(completion).format == "completion"


def test_byte_order_mark_crlf_blank_lines_and_no_last_newline_are_accepted(tmp_path: Path) -> None:
    line = json.dumps(CHAT).encode()
    file = tmp_path / "f"
    file.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n   \n" + line)
    assert [example.line for example in read_examples(file)] == [1, 4]
    report = validate_file(file, min_examples=2)
    assert (report.format, report.examples, report.error_count, report.summary) == ("chat", 2, 0, "")


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


@pytest.mark.parametrize(
    ("value", "code", "words"),
    [
        (b"{", "invalid_json", "column 2"),
        (b'{"text": "a"} x', "invalid_json", "Extra data"),
        (b'{"text": NaN}', "invalid_json", "NaN"),
        (b'{"text": -Infinity}', "invalid_json", "-Infinity"),
        (b'{"text": 1e999}', "invalid_json", "out of range"),
        (b'{"text": ' + b"1" * 5000 + b"}", "invalid_json", "an integer of more than 4,300 digits"),
        (b'{"text": "\xff"}', "invalid_utf8", "byte 11"),
        (b'{"text": "\\ud83d"}', "invalid_unicode", "other half"),
        (b"[" * 100_000, "too_deep", "64"),
        (b'{"text": ' + b"[" * 70 + b"]" * 70 + b"}", "too_deep", "64"),
        ([], "not_an_object", "a list"),
        (None, "not_an_object", "null"),
        ({"source": "x"}, "unknown_format", "source"),
        ({"mesages": []}, "unknown_format", "did you mean messages?"),
        ({"prompt": "a", "completions": "b"}, "unknown_key", "did you mean completion?"),
        ({"text": "a"} | {f"c{i}": 1 for i in range(1000)}, "too_many_columns", "1,001 keys"),
        ({"x" * 100_000: "a"}, "unknown_format", "xxx..."),
        ({"text": 3}, "wrong_type", "a number in text"),
        ({"text": ""}, "empty_text", "empty text"),
        ({"prompt": "a"}, "missing_field", "completion"),
        ({"prompt": ["a"], "completion": "b"}, "wrong_type", "a list in prompt"),
        ({"prompt": "a", "completion": ""}, "empty_text", "empty completion"),
        (chat(), "empty_list", "messages"),
        ({"messages": "hi"}, "wrong_type", "a string in messages"),
        (chat("hi"), "wrong_type", "messages[0]"),
        (chat({"content": "x"}), "missing_field", "messages[0].role"),
        (chat({"role": "bot", "content": "x"}), "unknown_role", "'bot'"),
        (chat(USER), "no_assistant_message", "assistant"),
        (chat(USER, {**ANSWER, "weight": 0}), "no_trained_message", "weight 0"),
        (chat(USER, {**ANSWER, "weight": 0.5}), "invalid_weight", "0.5"),
        (chat(USER, {**ANSWER, "weight": True}), "invalid_weight", "True"),
        (chat({**USER, "weight": 0}, ANSWER), "misplaced_key", "messages[0].weight"),
        (chat(USER, {**ANSWER, "wieght": 0}), "unknown_key", "did you mean weight?"),
        (chat(USER, {"role": "assistant"}), "missing_field", "messages[1].content"),
        (chat({"role": "user", "content": 5}, ANSWER), "wrong_type", "a number"),
        (chat({"role": "user", "content": []}, ANSWER), "empty_list", "messages[0]"),
        (chat({"role": "user", "content": [{"type": "image_url"}]}, ANSWER), "unsupported_content", "image"),
        (chat(USER, {"role": "assistant", "tool_calls": []}), "missing_field", "messages[1].content"),
        (chat(USER, {"role": "assistant", "tool_calls": [{"id": "1"}]}), "missing_field", "function"),
        (
            chat(USER, {"role": "assistant", "refusal": "No."}),
            "unsupported_content",
            "move its text to content",
        ),
        (chat(USER, {**ANSWER, "audio": {"id": "1"}}), "unsupported_content", "messages[1].audio"),
        (
            chat(USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}),
            "unsupported_content",
            "messages[1].content[0]",
        ),
        (chat(USER, {**ANSWER, "reasoning": "a", "reasoning_content": "b"}), "unknown_key", "reasoning"),
        (chat(USER, {"role": "assistant", "function_call": {"name": "f"}}), "wrong_type", "arguments"),
        (chat(USER, ANSWER, tools=[{"type": "function"}]), "missing_field", "tools[0].function"),
        (chat(USER, ANSWER, functions=[{"name": 1}]), "wrong_type", "functions[0].name"),
        (chat(USER, ANSWER, parallel_tool_calls="yes"), "wrong_type", "parallel_tool_calls"),
        (chat(USER, ANSWER, tool=[]), "unknown_key", "did you mean tools?"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, value: Any, code: str, words: str) -> None:
    file = write(tmp_path / "f", b"", value)
    (error,) = validate_file(file).errors
    assert (error.line, error.code) == (2, code)
    assert words in error.message
    assert len(error.message) < 300


def test_one_format_a_file(tmp_path: Path) -> None:
    file = write(tmp_path / "f", CHAT, {"text": "x"}, CHAT)
    (error,) = validate_file(file).errors
    assert (error.line, error.code) == (2, "mixed_formats")
    assert str(error) == "line 2 is of the format text in a file of the format chat"


def test_a_line_over_the_limit_is_skipped_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 2**16)
    file = write(tmp_path / "f", CHAT, b'{"text": "' + b"x" * 2**24 + b'"}', CHAT)
    tracemalloc.start()
    report = validate_file(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [(error.line, error.code) for error in report.errors] == [(2, "line_too_long")]
    assert report.examples == 2
    assert peak < 2**21


def test_errors_are_counted_and_the_first_kept(tmp_path: Path) -> None:
    file = write(tmp_path / "f", CHAT, *[b"{"] * 30)
    report = validate_file(file, min_examples=10)
    assert (report.examples, len(report.errors), report.error_count) == (1, 20, 30)
    with pytest.raises(InvalidFile) as caught:
        list(read_examples(file, "validation_file"))
    message = str(caught.value)
    assert (caught.value.code, caught.value.param) == ("invalid_validation_file", "validation_file")
    assert message.startswith("validation_file: line 2 is not JSON")
    assert message.endswith("and 25 more")


def test_nothing_is_read_after_a_bad_line(tmp_path: Path) -> None:
    examples = read_examples(write(tmp_path / "f", CHAT, b"{", CHAT))
    assert next(examples).line == 1
    with pytest.raises(InvalidFile, match="line 2 is not JSON"):
        next(examples)


def test_too_few_examples(tmp_path: Path) -> None:
    file = write_chat_file(tmp_path / "f", 9)
    (error,) = validate_file(file, min_examples=10).errors
    assert (error.line, error.code) == (None, "too_few_examples")
    assert "9 examples; at least 10" in error.message
    assert validate_file(file, min_examples=9).error_count == 0
    empty = write(tmp_path / "e", b"")
    with pytest.raises(InvalidFile, match="0 examples; at least 1"):
        list(read_examples(empty))
