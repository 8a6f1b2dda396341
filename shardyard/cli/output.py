"""What commands print: JSON for programs, tables for people; errors in one line on stderr."""

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from shardyard.errors import Refused, ShardyardError, Unreachable

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, and nothing else.")]

OK, FAILED, USAGE, UNREACHABLE, REFUSED, INTERRUPTED = 0, 1, 2, 3, 4, 130
EXIT_CODES = (
    "Exit codes: 0 done; 1 the job did not succeed, or something else failed; 2 wrong usage; "
    "3 no server answers; 4 the server refused."
)

console = Console()
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_line(text: str, style: str = "") -> None:
    """One line as it is: no markup, no colours of numbers, no wrapping inside ids and paths."""
    console.print(Text(text, style=style), soft_wrap=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Cells are text as it is: what users named things must not become markup. Nothing is cut or wrapped."""
    body = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(columns, *body, strict=True)]
    for number, row in enumerate([list(columns), *body]):
        padded = (set_cell_size(cell, width) for cell, width in zip(row, widths, strict=True))
        print_line("  ".join(padded).rstrip(), style="" if number else "bold")


def print_fields(fields: Iterable[tuple[str, object]]) -> None:
    """Names and values, those without a value left out."""
    known = [(name, str(value)) for name, value in fields if value is not None]
    widest = max((len(name) for name, _ in known), default=0)
    for name, value in known:
        console.print(Text.assemble((f"{name:<{widest}}  ", "bold"), value), soft_wrap=True)


def fail(error: ShardyardError) -> int:
    """Say what went wrong, in one line on stderr; the exit code."""
    print(f"error: {error}", file=sys.stderr)
    if isinstance(error, Unreachable):
        return UNREACHABLE
    return REFUSED if isinstance(error, Refused) else FAILED


def size(nbytes: float | None) -> str:
    if nbytes is None:
        return "-"
    unit = 0
    while nbytes >= 1024 and unit < len(UNITS) - 1:
        nbytes /= 1024
        unit += 1
    return f"{nbytes:.0f} {UNITS[unit]}" if unit == 0 else f"{nbytes:.1f} {UNITS[unit]}"


def moment(seconds: int | None) -> str:
    return "-" if seconds is None else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
