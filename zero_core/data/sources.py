"""Files as people have them: compressed, in another encoding, one JSON array, a table.

A training file is none of these; ``problem_of`` says what it is instead, and ``records`` reads it all the
same, for the conversion. Both hold one record in memory, whatever the size of the file.
"""

import bz2
import codecs
import csv
import gzip
import json
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from zero_core.data.lines import BLANK, MAX_LINE_BYTES, Line, LineProblem, first_value

CONVERT = "`shardyard files convert FILE` makes a training file of it"

_BLANKS = re.compile(f"[{BLANK}]*")
_HEAD = 2**16
_CHUNK = 2**20
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}
_OPENERS: dict[str, Callable[..., Any]] = {"gzip": gzip.open, "bzip2": bz2.open, "xz": lzma.open}
_TABLES = {b"PAR1": "Parquet", b"ARROW1": "Arrow"}
# UTF-32's mark begins with UTF-16's.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_UNMARKED = {b"?000": "utf-32-le", b"000?": "utf-32-be", b"?0?0": "utf-16-le", b"0?0?": "utf-16-be"}
"""Encodings of text that begins with two ASCII characters: where its first four bytes are zero."""

_COLUMNS = frozenset(
    {"messages", "prompt", "completion", "text", "instruction", "output", "response", "conversations"}
    | {"chosen", "rejected", "question", "answer"}
)
_DAMAGED = (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, gzip.BadGzipFile)


class Unreadable(LineProblem):
    """A file that can't be read record by record."""


@dataclass(frozen=True)
class Source:
    """How a file holds its records."""

    compression: str | None
    encoding: str
    layout: str
    """``json``: values after one another, ``array``, ``csv``, or the name of a kind of table."""

    delimiter: str = ","

    @property
    def words(self) -> tuple[str, ...]:
        """What about it is unlike a training file."""
        named = {"array": "a JSON array", "csv": "CSV", "json": None}.get(self.layout, self.layout)
        encoding = None if self.encoding.startswith("utf-8") else self.encoding[:6].upper()
        return tuple(word for word in (self.compression, encoding, named) if word)


def problem_of(path: Path) -> LineProblem | None:
    """Why a file as a whole is none of JSON lines; None for one to be read line by line."""
    source = _told_by(_head(path))
    if source.compression is not None:
        return LineProblem("compressed_file", f"the file is compressed with {source.compression}; {CONVERT}")
    if source.layout in _TABLES.values():
        return _table(source.layout)
    if not source.encoding.startswith("utf-8"):
        return LineProblem("wrong_encoding", f"the file is {source.words[0]} and not UTF-8; {CONVERT}")
    if source.layout == "array":
        return LineProblem("json_array", f"the file is one JSON array and not one example a line; {CONVERT}")
    if source.layout == "csv":
        return LineProblem("csv_file", f"the file is CSV and not JSON lines; {CONVERT}")
    if _is_pretty_printed(path, source):
        return LineProblem(
            "pretty_printed", f"the file has JSON over several lines and not one example a line; {CONVERT}"
        )
    return None


def source_of(path: Path) -> Source:
    """How ``path`` holds its records, looking through its compression. Raises Unreadable, OSError."""
    outside = _told_by(_head(path))
    if outside.compression is None:
        return outside
    with _unpacked(path, outside.compression) as file:
        inside = _told_by(file.read(_HEAD))
    if inside.compression is not None:
        raise Unreadable(
            "compressed_file", f"is compressed twice, with {outside.compression} and {inside.compression}"
        )
    return Source(outside.compression, inside.encoding, inside.layout, inside.delimiter)


def records(path: Path, source: Source) -> Iterator[Line]:
    """Every record with its number, counted from 1; after one that can't be read there are no more."""
    if source.layout in _TABLES.values():
        raise Unreadable("table_file", str(_table(source.layout)))
    with _unpacked(path, source.compression) as file:
        text = TextIOWrapper(cast(Any, file), encoding=source.encoding, newline="")
        rows = _csv_rows(text, source.delimiter) if source.layout == "csv" else _json_values(text)
        number = 0
        try:
            for number, value in enumerate(rows, start=1):
                yield Line(number, value)
        except LineProblem as problem:
            yield Line(number + 1, problem)
        except UnicodeDecodeError:
            yield Line(number + 1, LineProblem("wrong_encoding", f"is not {source.encoding.upper()}"))


def _table(kind: str) -> LineProblem:
    return LineProblem(
        "table_file",
        f"the file is {kind} and not JSON lines; write it as such, with pandas: "
        f"read_{'parquet' if kind == 'Parquet' else 'feather'}(FILE)"
        ".to_json(TARGET, orient='records', lines=True)",
    )


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD)


def _told_by(head: bytes) -> Source:
    for magic, name in _MAGIC.items():
        if head.startswith(magic):
            return Source(name, "utf-8", "json")
    for magic, name in _TABLES.items():
        if head.startswith(magic):
            return Source(None, "utf-8", name)
    encoding = _encoding_of(head)
    # A character may be cut at the end of the head.
    text = head.decode(encoding, errors="ignore").lstrip(BLANK)
    if text.startswith("[") and text[1:].lstrip(BLANK).startswith("{"):
        return Source(None, encoding, "array")
    delimiter = _csv_delimiter(text)
    return Source(None, encoding, "json" if delimiter is None else "csv", delimiter or ",")


def _encoding_of(head: bytes) -> str:
    for mark, name in _MARKS:
        if head.startswith(mark):
            return name
    zeros = bytes(ord("0") if byte == 0 else ord("?") for byte in head[:4])
    return _UNMARKED.get(zeros, "utf-8-sig")


def _csv_delimiter(text: str) -> str | None:
    """What separates the columns, if the first line names columns that convert knows."""
    header = text.partition("\n")[0].strip()
    if header.startswith(("{", "[")):
        return None
    for delimiter in (",", "\t", ";"):
        names = {name.strip().strip('"').lower() for name in header.split(delimiter)}
        if len(names) > 1 and names & _COLUMNS:
            return delimiter
    return None


def _is_pretty_printed(path: Path, source: Source) -> bool:
    """Whether the first value is an object that takes several lines."""
    with path.open("rb") as file:
        text = TextIOWrapper(file, encoding=source.encoding, errors="replace", newline="")
        first = ""
        while not first and (line := text.readline(_HEAD)):
            first = line.strip(BLANK)
        if not first.startswith("{") or len(first) == _HEAD:
            return False
        try:
            first_value(first)
        except json.JSONDecodeError:
            text.seek(0)
        except LineProblem:
            return False
        else:
            return False
        try:
            return isinstance(next(_json_values(text), None), dict)
        except LineProblem:
            return False


@contextmanager
def _unpacked(path: Path, compression: str | None) -> Iterator[BinaryIO]:
    """The bytes inside. Raises Unreadable where they can't be had."""
    with ExitStack() as opened:
        try:
            if compression is None:
                yield opened.enter_context(path.open("rb"))
            elif compression in _OPENERS:
                yield opened.enter_context(_OPENERS[compression](path, "rb"))
            elif compression == "zip":
                yield opened.enter_context(_only_member(opened.enter_context(zipfile.ZipFile(path))))
            else:
                raise Unreadable("compressed_file", f"is compressed with {compression}: unpack it first")
        except _DAMAGED as error:
            raise Unreadable("compressed_file", f"is damaged, or not whole: {error}") from error
        except OSError as error:
            if error.errno is not None:
                raise
            raise Unreadable("compressed_file", f"is damaged: {error}") from error  # as bz2 says it


def _only_member(archive: zipfile.ZipFile) -> BinaryIO:
    names = [name for name in archive.namelist() if not name.endswith("/") and "__MACOSX" not in name]
    if len(names) != 1:
        raise Unreadable(
            "compressed_file", f"is a zip archive of {len(names)} files: unpack it and name one of them"
        )
    try:
        return cast(BinaryIO, archive.open(names[0]))
    except (RuntimeError, NotImplementedError) as error:  # a password, a method that zipfile does not know
        raise Unreadable("compressed_file", f"is a zip archive that can't be unpacked: {error}") from error


def _json_values(text: TextIO) -> Iterator[Any]:
    """Values after one another or in one array, whatever the line ends. Raises LineProblem at one that is
    no JSON or too long."""
    buffer = _Buffer(text)
    in_array = buffer.next_character() == "["
    if in_array:
        buffer.take()
    while character := buffer.next_character():
        if in_array and character == "]":
            buffer.take()
            if buffer.next_character():
                raise LineProblem("invalid_json", "stands after the end of the array")
            return
        yield buffer.take_value()
        if buffer.next_character() == ",":
            buffer.take()
    if in_array:
        raise LineProblem("invalid_json", "is missing: the array has no end")


class _Buffer:
    """Text that is read on as far as a value needs."""

    def __init__(self, text: TextIO) -> None:
        self._text = text
        self._held = ""
        self._at = 0

    def next_character(self) -> str:
        """The first that is not blank; empty at the end."""
        while (start := _after_blank(self._held, self._at)) == len(self._held):
            self._held, self._at = self._text.read(_CHUNK), 0
            if not self._held:
                return ""
        self._at = start
        return self._held[start]

    def take(self) -> None:
        self._at += 1

    def take_value(self) -> Any:
        while True:
            try:
                value, self._at = first_value(self._held, self._at)
            except json.JSONDecodeError as error:
                held = len(self._held) - self._at
                if held > MAX_LINE_BYTES:
                    raise LineProblem(
                        "line_too_long", f"is longer than {MAX_LINE_BYTES:,} bytes, or not JSON: {error.msg}"
                    ) from None
                more = self._text.read(max(held, _CHUNK))
                if not more:
                    raise LineProblem("invalid_json", f"is not JSON: {error.msg}") from None
                self._held, self._at = self._held[self._at :] + more, 0
            else:
                return value


def _after_blank(text: str, start: int) -> int:
    return cast(re.Match[str], _BLANKS.match(text, start)).end()


def _csv_rows(text: TextIO, delimiter: str) -> Iterator[dict[str, Any]]:
    """Rows by the names of their columns. What looks like JSON in a cell is; empty cells are left out."""
    csv.field_size_limit(MAX_LINE_BYTES)
    rows = csv.DictReader(text, delimiter=delimiter, strict=True)
    try:
        for row in rows:
            if None in row:
                raise LineProblem("invalid_csv", "has more cells than there are columns")
            # A column without a name is the index that pandas writes.
            yield {key.strip(): _cell(cell) for key, cell in row.items() if cell and key.strip()}
    except csv.Error as error:
        raise LineProblem("invalid_csv", f"is not CSV: {error}") from None


def _cell(cell: str) -> Any:
    """Lists and objects are written into tables as JSON; numbers stay text."""
    if cell.lstrip(BLANK).startswith(("[{", "{")):
        try:
            value, end = first_value(cell)
        except json.JSONDecodeError:
            return cell
        if not cell[end:].strip(BLANK):
            return value
    return cell
