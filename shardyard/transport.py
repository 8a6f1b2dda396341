"""One request to the server, tried again where that can help and can do no harm."""

import random
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import httpx

from shardyard.address import Address
from shardyard.errors import Unreachable, error_answer

TRIES = 4
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 8.0
TIMEOUT = httpx.Timeout(30, connect=5, write=300)

TRANSIENT = frozenset({429, 500, 502, 503, 504})
"""Statuses after which the same request can succeed."""


class Transport:
    def __init__(self, address: Address) -> None:
        self.url = address.url
        self._http = httpx.Client(
            base_url=f"{address.url}/v1",
            headers={"Authorization": f"Bearer {address.api_key}"},
            timeout=TIMEOUT,
        )

    def send(
        self, method: str, path: str, *, fresh: Callable[[], dict[str, Any]] = dict, **arguments: Any
    ) -> httpx.Response:
        """The answer, if it is a success; raises ``ErrorAnswer`` or ``Unreachable``.

        ``fresh`` makes arguments anew for each try: a file that was read once is at its end.
        """
        for number in range(1, TRIES + 1):
            last = number == TRIES
            try:
                response = self._http.request(method, path, **arguments, **fresh())
            except httpx.TransportError as error:
                if last:
                    raise self._unreachable(error) from error
                pause = _pause(number)
            else:
                if response.is_success:
                    return response
                if last or not _may_pass(response):
                    raise error_answer(response)
                pause = _retry_after(response) or _pause(number)
            time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def _unreachable(self, error: httpx.TransportError) -> Unreachable:
        cause = str(error) or type(error).__name__
        return Unreachable(
            f"{self.url} does not answer ({cause}). Start the server with `shardyard up`, or set "
            "SHARDYARD_URL to where it is"
        )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> "Transport":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _may_pass(response: httpx.Response) -> bool:
    return response.status_code in TRANSIENT and response.headers.get("x-should-retry") != "false"


def _pause(number: int) -> float:
    """Twice as long each time, with jitter, so that many clients do not come back at once."""
    longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (number - 1))
    return longest * random.uniform(0.5, 1.0)


def _retry_after(response: httpx.Response) -> float | None:
    try:
        seconds = float(response.headers.get("retry-after", ""))
    except ValueError:
        return None
    return min(max(0.0, seconds), LONGEST_PAUSE_SECONDS)
