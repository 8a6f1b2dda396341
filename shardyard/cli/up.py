"""``shardyard up``: the embedded stack, until it is told to stop."""

import signal
from pathlib import Path
from typing import Annotated

import typer

from shardyard.address import data_dir
from shardyard.cli.output import console
from shardyard.stack.stack import DEFAULT_PORT, Stack

DataDir = Annotated[
    Path | None,
    typer.Option("--data", help="Where everything is kept; SHARDYARD_DATA_DIR or .shardyard if left out."),
]


def up(
    data: DataDir = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535)] = DEFAULT_PORT,
) -> None:
    """Run the whole service on this machine: database, broker, API and worker."""
    stack = Stack(data or data_dir(), host, port, say=lambda line: console.print(line, style="dim"))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # nohup ignores SIGHUP, and means it.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stack.request_stop)
    with stack:
        console.print(f"Shardyard is at {stack.url}", style="bold", highlight=False)
        console.print(f"The API key is in {stack.client_file}; logs are in {stack.data_dir / 'log'}.")
        console.print("Ctrl-C stops it.")
        stack.wait()
        console.print("Stopping.")
