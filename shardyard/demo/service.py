"""The service that the demo talks to: the one that runs on its data directory, else one of its own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from shardyard.address import Address, read_client_file
from shardyard.cli.output import print_line
from shardyard.client import Shardyard
from shardyard.errors import NotConfigured
from shardyard.stack.stack import Stack


@contextmanager
def service(data_dir: Path, port: int, ranks: int) -> Iterator[Shardyard]:
    """A client of the service on ``data_dir``, which is stopped afterwards if it was started here."""
    running = _running(data_dir)
    if running is not None:
        print_line(f"The service at {running.url} runs already", style="dim")
        with Shardyard(running.url, running.api_key) as client:
            yield client
        return
    if len(os.sched_getaffinity(0)) < ranks:
        # A host offers as many ranks as it has cores; the demo wants its ranks on a single core too.
        os.environ.setdefault("SHARDYARD_SLOTS", str(ranks))
    with Stack(data_dir, port=port, say=lambda line: print_line(line, style="dim")):
        known = read_client_file(data_dir)
        with Shardyard(known.url, known.api_key) as client:
            yield client


def _running(data_dir: Path) -> Address | None:
    try:
        known = read_client_file(data_dir)
        answer = httpx.get(f"{known.url}/healthz", timeout=5)
    except (NotConfigured, httpx.TransportError):
        return None
    return known if answer.is_success else None
