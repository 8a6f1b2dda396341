"""The Python client: ``Shardyard().jobs.submit(model=..., training_file=...)``.

Answers are the API's JSON objects as dicts. Errors are ``shardyard.errors``.
"""

import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from shardyard import address
from shardyard.errors import Refused, Unreachable

Json = dict[str, Any]

RETRIES = 3
FIRST_PAUSE = 0.5
TERMINAL = ("succeeded", "failed", "cancelled")


class Shardyard:
    """Url and key come from the arguments, the environment, or the embedded stack's ``client.json``."""

    def __init__(
        self, url: str | None = None, api_key: str | None = None, data_dir: Path | None = None
    ) -> None:
        found = address.find(url, api_key, data_dir)
        self.url = found.url
        self._http = httpx.Client(
            base_url=f"{found.url}/v1",
            headers={"Authorization": f"Bearer {found.api_key}"},
            timeout=httpx.Timeout(30, write=300),
        )
        self.files = Files(self)
        self.jobs = Jobs(self)
        self.models = Models(self)

    def request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        """One call; tried again where that is safe: the server was not reached, or said to wait."""
        pause = FIRST_PAUSE
        for attempt in range(RETRIES + 1):
            last = attempt == RETRIES
            try:
                response = self._http.request(method, path, **arguments)
            except httpx.TransportError as error:
                if last or not isinstance(error, httpx.ConnectError):
                    raise Unreachable(
                        f"{self.url} does not answer ({error}). Is `shardyard up` running?"
                    ) from error
            else:
                if last or response.status_code not in (429, 502, 503, 504):
                    return _checked(response)
            time.sleep(pause)
            pause *= 2
        raise AssertionError("the last attempt returns or raises")

    def pages(self, path: str, limit: int, **parameters: Any) -> Iterator[Json]:
        """Every item of a list, page by page."""
        after: Json = {}
        while True:
            page = self.request("GET", path, params={**parameters, "limit": limit, **after}).json()
            yield from page["data"]
            if not page["has_more"]:
                return
            after = {"after": page["data"][-1]["id"]}

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> "Shardyard":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Files:
    def __init__(self, client: Shardyard) -> None:
        self._client = client

    def upload(self, path: Path) -> Json:
        with path.open("rb") as file:
            answer = self._client.request(
                "POST", "/files", data={"purpose": "fine-tune"}, files={"file": (path.name, file)}
            )
        return _object(answer)

    def list(self) -> Iterator[Json]:
        return self._client.pages("/files", 1000)

    def content(self, file_id: str) -> bytes:
        return self._client.request("GET", f"/files/{file_id}/content").content


class Models:
    def __init__(self, client: Shardyard) -> None:
        self._client = client

    def list(self) -> Iterator[Json]:
        return iter(self._client.request("GET", "/models").json()["data"])

    def add(self, name: str, path: Path) -> Json:
        """Register a directory, as the server sees it, as a base model."""
        body = {"id": name, "path": str(path)}
        return _object(self._client.request("POST", "/models", json=body))


class Jobs:
    def __init__(self, client: Shardyard) -> None:
        self._client = client

    def submit(self, **body: Any) -> Json:
        """The body of ``POST /v1/fine_tuning/jobs``. A call that is repeated makes one job."""
        return _object(
            self._client.request(
                "POST", "/fine_tuning/jobs", json=body, headers={"Idempotency-Key": uuid.uuid4().hex}
            )
        )

    def list(self) -> Iterator[Json]:
        """Newest first."""
        return self._client.pages("/fine_tuning/jobs", 100)

    def show(self, job_id: str) -> Json:
        return _object(self._client.request("GET", f"/fine_tuning/jobs/{job_id}"))

    def cancel(self, job_id: str) -> Json:
        return _object(self._client.request("POST", f"/fine_tuning/jobs/{job_id}/cancel"))

    def events(self, job_id: str) -> Iterator[Json]:
        """Newest first."""
        return self._client.pages(f"/fine_tuning/jobs/{job_id}/events", 1000)

    def checkpoints(self, job_id: str) -> Iterator[Json]:
        """Newest first."""
        return self._client.pages(f"/fine_tuning/jobs/{job_id}/checkpoints", 100)

    def telemetry(self, job_id: str, after_step: int = -1) -> Json:
        parameters = {"after_step": after_step, "limit": 10_000}
        answer = self._client.request("GET", f"/fine_tuning/jobs/{job_id}/telemetry", params=parameters)
        return _object(answer)

    def logs(self, job_id: str, tail: int = 1000) -> str:
        return self._client.request("GET", f"/fine_tuning/jobs/{job_id}/logs", params={"tail": tail}).text

    def watch(self, job_id: str, seconds: float = 1.0) -> Iterator[Json]:
        """The job again and again, the last time when it has ended."""
        while True:
            job = self.show(job_id)
            yield job
            if job["status"] in TERMINAL:
                return
            time.sleep(seconds)


def _object(response: httpx.Response) -> Json:
    body: Json = response.json()
    return body


def _checked(response: httpx.Response) -> httpx.Response:
    if response.is_success:
        return response
    try:
        error = response.json()["error"]
        message, code, param = str(error["message"]), error["code"], error["param"]
    except (ValueError, KeyError, TypeError):
        message, code, param = f"{response.status_code} {response.text[:200]}", None, None
    raise Refused(
        message,
        status=response.status_code,
        code=code,
        param=param,
        request_id=response.headers.get("x-request-id"),
    )
