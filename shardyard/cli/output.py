"""What commands print: JSON for programs, tables for people; errors in one line on stderr."""

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardyard.errors import Refused, ShardyardError, Unreachable

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output, and nothing else.")]

console = Console()

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Cells are text as it is: what users named things must not become markup."""
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(Text("-" if cell is None else str(cell)) for cell in row))
    console.print(table)


def print_fields(fields: Iterable[tuple[str, object]]) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, value in fields:
        table.add_row(Text(name, style="bold"), Text("-" if value is None else str(value)))
    console.print(table)


def fail(error: ShardyardError) -> int:
    """Say what went wrong; the exit code."""
    print(f"error: {error}", file=sys.stderr)
    if isinstance(error, Unreachable):
        return 3
    if isinstance(error, Refused):
        if error.status >= 500:
            print(f"The server's log has more under {error.request_id}.", file=sys.stderr)
        return 4
    return 1


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
