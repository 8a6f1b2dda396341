"""Waiting for what other processes do: on a condition, with a deadline."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], what: str, seconds: float = 60) -> T:
    """The condition's first value that is true. Fails when there is none in time."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s in vain until {what}"
        pause.wait(0.05)
    return value
