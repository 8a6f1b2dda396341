"""``shardyard demo``: the main job on real input, from nothing."""

import sys
from typing import Annotated

import typer

from shardyard.address import data_dir
from shardyard.cli.output import INTERRUPTED
from shardyard.cli.up import DataDir
from shardyard.demo.run import run_demo
from shardyard.stack.stack import DEFAULT_PORT


def demo(
    data: DataDir = None,
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="Where the API listens, if it does not run yet.")
    ] = DEFAULT_PORT,
) -> None:
    """Fine-tune a small real model on this machine, and show what came of it.

    Starts the embedded stack unless it runs on this data directory already. The exit code is 0 only if
    the validation loss fell and the exported model loads.
    """
    try:
        run_demo(data or data_dir(), port)
    except KeyboardInterrupt:
        print("Interrupted. The next `shardyard demo` goes on where this one stopped.", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
