"""Files in other forms: named by the check of a training file, and converted to the same examples."""

import bz2
import gzip
import io
import json
import lzma
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zero_core.data import lines, sources
from zero_core.data.convert import Unconvertible, convert, default_target
from zero_core.data.formats import validate_file

ASK = {"role": "user", "content": "qé"}
GOOD = {"role": "assistant", "content": "good"}
BAD = {"role": "assistant", "content": "bad"}
CHAT = {"messages": [ASK, GOOD]}
PAIR = {"input": {"messages": [ASK]}, "preferred_output": [GOOD], "non_preferred_output": [BAD]}
JSONL = "".join(json.dumps(CHAT, ensure_ascii=False) + "\n" for _ in range(3))


def converted(source: Path, **options: Any) -> list[Any]:
    """The records that come of ``source``, which the check takes as a training file."""
    target = source.with_name("converted.jsonl")
    done = convert(source, target, **options)
    report = validate_file(target)
    assert (report.format, report.examples, report.error_count) == (done.format, done.records, 0)
    return [json.loads(line) for line in target.read_text("utf-8").splitlines()]


def zipped(*contents: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, content in enumerate(contents):
            archive.writestr(f"{number}.jsonl", content)
    return file.getvalue()


@pytest.mark.parametrize(
    ("content", "code", "named"),
    [
        (gzip.compress(JSONL.encode()), "compressed_file", "gzip"),
        (bz2.compress(JSONL.encode()), "compressed_file", "bzip2"),
        (lzma.compress(JSONL.encode()), "compressed_file", "xz"),
        (zipped(JSONL.encode()), "compressed_file", "zip"),
        (gzip.compress(json.dumps([CHAT] * 3, indent=1).encode("utf-16")), "compressed_file", "gzip"),
        (JSONL.encode("utf-16"), "wrong_encoding", "UTF-16"),
        (JSONL.encode("utf-16-le"), "wrong_encoding", "UTF-16"),
        (JSONL.encode("utf-16-be"), "wrong_encoding", "UTF-16"),
        (JSONL.encode("utf-32"), "wrong_encoding", "UTF-32"),
        (JSONL.encode("utf-32-be"), "wrong_encoding", "UTF-32"),
        (json.dumps([CHAT] * 3).encode(), "json_array", "JSON array"),
        (json.dumps([CHAT] * 3, indent=4).encode("utf-8-sig"), "json_array", "JSON array"),
        (b"\r\n" + (json.dumps(CHAT, indent=4) + "\n").encode() * 3, "pretty_printed", "over several lines"),
        (
            b'id,messages\n0,"' + json.dumps(CHAT["messages"]).replace('"', '""').encode() + b'"\n',
            "csv_file",
            "CSV",
        ),
    ],
)
def test_how_a_file_is_stored_is_named_and_undone(
    tmp_path: Path, content: bytes, code: str, named: str
) -> None:
    file = tmp_path / "f"
    file.write_bytes(content)
    (error,) = validate_file(file).errors
    assert (error.line, error.code) == (None, code)
    assert named in error.message
    assert "`shardyard files convert FILE`" in error.message
    assert [{"messages": record["messages"]} for record in converted(file)] == [CHAT] * (
        1 if code == "csv_file" else 3
    )


CALLS = {"name": "f", "arguments": {"a": 1}}
SHAREGPT = {
    "system": "s",
    "conversations": [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": json.dumps(CALLS)},
        {"from": "observation", "value": "r"},
        {"from": "gpt", "value": "a", "weight": 0},
        {"from": "human", "value": "q2"},
        {"from": "gpt", "value": "a2"},
    ],
    "tools": json.dumps([{"name": "f"}]),
}
FROM_SHAREGPT = {
    "messages": [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call00000",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"a": 1}'},
                }
            ],
        },
        {"role": "tool", "content": "r", "tool_call_id": "call00000"},
        {"role": "assistant", "content": "a", "weight": 0},
        {"role": "user", "content": "q2"},
        {"role": "assistant", "content": "a2"},
    ],
    "tools": [{"type": "function", "function": {"name": "f"}}],
}


def said(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


@pytest.mark.parametrize(
    ("record", "name", "expected"),
    [
        (SHAREGPT, "ShareGPT", FROM_SHAREGPT),
        ({"conversations": [ASK, GOOD]}, "ShareGPT", CHAT),
        ({"instruction": "i", "input": "n", "output": "o"}, "Alpaca", said("i\n\nn", "o")),
        ({"instruction": "i", "input": "", "output": "o", "text": "t"}, "Alpaca", said("i", "o")),
        ({"instruction": "i", "context": "c", "response": "o"}, "Alpaca", said("i\n\nc", "o")),
        ({"instruction": "i", "output": "o", "history": [["a", "b"]]}, "Alpaca", said("a", "b", "i", "o")),
        (
            {"prompt": [ASK, BAD, ASK], "completion": [GOOD]},
            "lists of messages",
            {"messages": [ASK, {**BAD, "weight": 0}, ASK, GOOD]},
        ),
        ({"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]}, "chosen and rejected", PAIR),
        ({"prompt": "qé", "chosen": "good", "rejected": "bad"}, "chosen and rejected", PAIR),
        ({"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, "chosen and rejected", PAIR),
        ({"chosen": [ASK, GOOD], "rejected": [ASK, BAD], **CHAT}, "chosen and rejected", PAIR),
        (
            {"chosen": [ASK, GOOD], "rejected": [ASK, GOOD]},
            "chosen and rejected",
            PAIR | {"non_preferred_output": [GOOD]},
        ),
        ({"prompt": "qé", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, "chosen and rejected", PAIR),
        (
            {"conversations": [{"from": "human", "value": "qé"}]}
            | {"chosen": {"from": "gpt", "value": "good"}, "rejected": {"from": "gpt", "value": "bad"}},
            "chosen and rejected",
            PAIR,
        ),
        (
            {"system": "s", "question": "qé", "chosen": "good", "rejected": "bad"},
            "chosen and rejected",
            PAIR | {"input": {"messages": [{"role": "system", "content": "s"}, ASK]}},
        ),
    ],
)
def test_another_trainers_format_is_named_and_converted(
    tmp_path: Path, record: dict[str, Any], name: str, expected: Any
) -> None:
    file = tmp_path / "f"
    file.write_text((json.dumps(record) + "\n") * 3)
    (error,) = validate_file(file).errors
    assert (error.line, error.code) == (None, "foreign_format")
    assert name in error.message
    assert converted(file) == [expected] * 3


def test_what_a_conversion_leaves_out_is_told(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text(json.dumps([{"instruction": "i", "output": "o", "source": "x", "text": "t"}] * 2))
    done = convert(file, tmp_path / "t")
    assert done.was == ("a JSON array", "Alpaca (instruction, input and output)")
    assert done.warnings == (
        "the column 'source' is left out (2 records, the first is 1)",
        "the column 'text' is left out (2 records, the first is 1)",
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "0 examples"),
        (b"PAR1....", "read_parquet(FILE).to_json"),
        (b"ARROW1..", "read_feather(FILE).to_json"),
        (b"\x28\xb5\x2f\xfd....", "compressed with zstd: unpack it first"),
        (gzip.compress(JSONL.encode())[:-9], "is damaged, or not whole"),
        (gzip.compress(gzip.compress(JSONL.encode())), "compressed twice"),
        (bz2.compress(JSONL.encode())[:40] + b"x" * 40, "is damaged"),
        (zipped(b"", b""), "a zip archive of 2 files"),
        (json.dumps([CHAT] * 3).encode()[:-9], "record 3 is not JSON"),
        (json.dumps([CHAT] * 3).encode()[:-1], "record 4 is missing: the array has no end"),
        (json.dumps([CHAT]).encode() + b"{}", "record 2 stands after the end"),
        (JSONL.encode() + b'{"messages": []}', "record 4 has an empty list in messages"),
        (JSONL.encode() + b'{"instruction": "i", "output": 3}', "record 4 has a number in output"),
        (JSONL.encode() + b'{"text": "a"}', "record 4 is of the format text in a file of the format chat"),
        (JSONL.encode() + b'{"text": "\xff"}', "is not UTF-8"),
        (b'{"text": ' + b"[" * 100_000, "deeper than 64 levels"),
        (b'[{"text": ' + b"1" * 5_000 + b"}]", "an integer of more than 4,300 digits"),
        (b"prompt,completion\na,b\nc,d,e\n", "record 2 has more cells"),
        (b'{"conversations": [{"from": "bob", "value": "q"}]}', "conversations[0].from 'bob'"),
        (b'{"chosen": "Human: a Assistant: b", "rejected": "c"}', "has no prompt"),
    ],
)
def test_what_cannot_be_converted_is_named_and_nothing_is_written(
    tmp_path: Path, content: bytes, words: str
) -> None:
    file = tmp_path / "source"
    file.write_bytes(content)
    with pytest.raises(Unconvertible) as caught:
        convert(file, tmp_path / "target")
    assert words in str(caught.value)
    assert str(caught.value).startswith("source: ")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_target_is_replaced_only_when_asked(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text(JSONL)
    target.write_text("mine")
    with pytest.raises(FileExistsError):
        convert(source, target)
    assert target.read_text() == "mine"
    convert(source, target, overwrite=True)
    assert target.read_text() == JSONL
    convert(source, source, overwrite=True)
    assert source.read_text() == JSONL


def test_the_default_target_is_another_file() -> None:
    for source, target in (
        ("a/x.json.gz", "a/x.jsonl"),
        ("x.v1.json", "x.v1.jsonl"),
        ("x.jsonl", "x.converted.jsonl"),
        ("x", "x.jsonl"),
    ):
        assert default_target(Path(source)) == Path(target)


def test_records_are_read_across_the_borders_of_what_is_read_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_CHUNK", 7)
    values = [{"text": 'é\\"\n' * n, "n": {"a": [n, {}]}} for n in range(1, 40)]
    file = tmp_path / "f"
    for dump in (json.dumps(values), json.dumps(values, indent=2), "\r\n\r\n".join(map(json.dumps, values))):
        file.write_text(dump, newline="")
        assert converted(file, overwrite=True) == values


@pytest.mark.parametrize("write", [json.dumps, lambda values: "\n".join(map(json.dumps, values))])
def test_memory_is_bounded_by_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Any], str]
) -> None:
    monkeypatch.setattr(sources, "_CHUNK", 2**12)
    file, target = tmp_path / "f", tmp_path / "t"
    file.write_text(write([{"text": "x" * 4000}] * 1000))
    tracemalloc.start()
    assert convert(file, target).records == 1000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20 < file.stat().st_size


def test_an_endless_record_is_refused_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (lines, sources):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 2**16)
    monkeypatch.setattr(sources, "_CHUNK", 2**12)
    file = tmp_path / "f"
    file.write_bytes(gzip.compress(b'[{"text": "' + b"x" * 2**24))
    tracemalloc.start()
    with pytest.raises(Unconvertible, match="record 1 is longer than 65,536 bytes"):
        convert(file, tmp_path / "t")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**21


def test_kinds_of_left_out_columns_are_bounded(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("\n".join(json.dumps({"instruction": "i", "output": "o", f"c{i}": 1}) for i in range(50)))
    warnings = convert(file, tmp_path / "t").warnings
    assert (len(warnings), warnings[-1]) == (21, "30 warnings more of other kinds")
