"""Retries and errors, against a server on loopback that answers as it is told."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardyard import errors, transport
from shardyard.client import Shardyard
from shardyard.transport import TRIES
from tests.shardyard.conftest import free_port
from tests.shardyard.scripted_server import Answer, Scripted


@pytest.fixture
def client(server: Scripted) -> Iterator[Shardyard]:
    with Shardyard(server.url, "secret") as client:
        yield client


def refusal(status: int, code: str, **headers: str) -> Answer:
    error = {"message": f"no: {code}", "type": "invalid_request_error", "param": "model", "code": code}
    return Answer(status, json.dumps({"error": error}).encode(), {"x-request-id": "req_1", **headers})


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again(server: Scripted, client: Shardyard, status: int) -> None:
    server.answers = [Answer(status), Answer(status), Answer(200, b'{"id": "ftjob-1"}')]
    assert client.jobs.show("ftjob-1") == {"id": "ftjob-1"}
    assert len(server.requests) == 3
    assert {request.headers["authorization"] for request in server.requests} == {"Bearer secret"}


def test_it_gives_up_after_so_many_tries(server: Scripted, client: Shardyard) -> None:
    server.answers = [refusal(503, "unavailable")]
    with pytest.raises(errors.ServerFailed, match="no: unavailable"):
        client.jobs.show("ftjob-1")
    assert len(server.requests) == TRIES


def test_a_job_keeps_its_idempotency_key_over_the_tries(server: Scripted, client: Shardyard) -> None:
    server.answers = [Answer(502), Answer(200)]
    client.jobs.submit("m", "file-1")
    server.answers = [Answer(200)]
    client.jobs.submit("m", "file-1")
    first, again, other = (request.headers["idempotency-key"] for request in server.requests)
    assert first == again
    assert first != other


def test_an_upload_is_sent_whole_at_each_try(server: Scripted, client: Shardyard, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "all of it"}\n')
    server.answers = [Answer(503), Answer(200)]
    client.files.upload(path)
    assert [b"all of it" in request.body for request in server.requests] == [True, True]


def test_the_server_says_when_to_come_back_and_whether(
    server: Scripted, client: Shardyard, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(transport.time, "sleep", pauses.append)
    server.answers = [Answer(429, headers={"retry-after": "3"}), Answer(200)]
    client.jobs.show("ftjob-1")
    assert pauses == [3.0]
    server.answers = [refusal(503, "never", **{"x-should-retry": "false"})]
    with pytest.raises(errors.ServerFailed):
        client.jobs.show("ftjob-1")
    assert pauses == [3.0]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, errors.BadRequest),
        (401, errors.Unauthenticated),
        (403, errors.Forbidden),
        (404, errors.NotFound),
        (405, errors.Refused),
        (409, errors.Conflict),
        (413, errors.TooLarge),
        (422, errors.Unprocessable),
    ],
)
def test_a_refusal_is_final_and_carries_what_the_server_said(
    server: Scripted, client: Shardyard, status: int, kind: type[errors.Refused]
) -> None:
    server.answers = [refusal(status, "some_code")]
    with pytest.raises(errors.Refused) as caught:
        client.jobs.show("ftjob-1")
    error = caught.value
    assert type(error) is kind
    assert (error.status, error.code, error.param, error.request_id) == (
        status,
        "some_code",
        "model",
        "req_1",
    )
    assert str(error) == "no: some_code (request req_1)"
    assert len(server.requests) == 1


@pytest.mark.parametrize("body", [b"<html>Bad gateway</html>", b"[]", b'{"error": "text"}', b'{"detail": 1}'])
def test_a_page_that_is_not_the_servers_is_quoted(server: Scripted, client: Shardyard, body: bytes) -> None:
    server.answers = [Answer(404, body)]
    with pytest.raises(errors.NotFound) as caught:
        client.jobs.show("ftjob-1")
    assert body.decode()[:10] in str(caught.value)
    assert caught.value.code == "http_404"


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "FIRST_PAUSE_SECONDS", 0.001)
    with (
        Shardyard(f"http://127.0.0.1:{free_port()}", "secret") as client,
        pytest.raises(errors.Unreachable, match=r"does not answer .*shardyard up"),
    ):
        client.jobs.show("ftjob-1")


def test_lists_are_read_page_by_page(server: Scripted, client: Shardyard) -> None:
    server.answers = [
        Answer(200, b'{"data": [{"id": "a"}, {"id": "b"}], "has_more": true}'),
        Answer(200, b'{"data": [{"id": "c"}], "has_more": false}'),
    ]
    assert [item["id"] for item in client.jobs.list()] == ["a", "b", "c"]
    assert [request.path.partition("?")[2] for request in server.requests] == [
        "limit=100",
        "limit=100&after=b",
    ]
