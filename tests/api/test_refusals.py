"""Bodies and names that are wrong, huge or hostile: a clear 4xx in OpenAI's shape, and nothing stays."""

from collections.abc import Iterator

import httpx
import pytest

from api.transport import JSON_LIMIT, UPLOAD_SLACK
from tests.api.conftest import Server, error_of

JOBS = "/v1/fine_tuning/jobs"


def test_unknown_paths_and_methods_have_the_error_shape(http: httpx.Client) -> None:
    for path in (
        "/",
        "/v1",
        "/v1/none",
        "/v1/files/",
        "/v1/fine_tuning/alpha/graders/run",
        "/docs",
        "/openapi.json",
    ):
        missing = http.get(path)
        assert missing.status_code == 404
        assert error_of(missing)["message"] == f"Unknown request URL: GET {path}"
    wrong = http.put("/v1/files")
    assert wrong.status_code == 405
    assert wrong.headers["allow"]
    assert error_of(wrong)["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    ("path", "params", "param"),
    [
        (JOBS, {"limit": "0"}, "limit"),
        (JOBS, {"limit": "101"}, "limit"),
        (JOBS, {"limit": "many"}, "limit"),
        (JOBS, {"after": "ftjob-\0"}, None),
        (JOBS, {"after": "x" * 300}, "after"),
        (JOBS, {"metadata[key]": "\0"}, None),
        (JOBS, {"metadata.key": "x"}, "metadata.key"),
        ("/v1/files", {"order": "up"}, "order"),
        ("/v1/files", {"after": "file-none"}, "after"),
    ],
)
def test_a_wrong_parameter_is_named(
    http: httpx.Client, path: str, params: dict[str, str], param: str | None
) -> None:
    answer = http.get(path, params=params)
    assert answer.status_code == 400, answer.text
    assert error_of(answer)["param"] == param


@pytest.mark.parametrize(
    ("report", "params"),
    [
        ("events", {"after": "ftevent-0"}),
        ("events", {"after": "ftevent-x"}),
        ("events", {"limit": "1001"}),
        ("checkpoints", {"after": "ftckpt_none"}),
        ("telemetry", {"after_step": "-2"}),
        ("telemetry", {"after_step": "9" * 30}),
        ("logs", {"tail": "0"}),
        ("logs", {"attempt": "9" * 30}),
    ],
)
def test_a_wrong_parameter_of_a_report_is_named(
    http: httpx.Client, training_file: str, report: str, params: dict[str, str]
) -> None:
    job_id = http.post(JOBS, json={"model": "tiny", "training_file": training_file}).json()["id"]
    answer = http.get(f"{JOBS}/{job_id}/{report}", params=params)
    assert answer.status_code == 400, answer.text
    assert error_of(answer)["param"] == next(iter(params))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{not json",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"model":' * 100_000,
        b'{"seed": ' + b"9" * 5_000 + b"}",
        b'{"model": NaN}',
        b'{"training": {"learning_rate": 1e999}}',
        b'{"model": "a\\u0000", "training_file": "b"}',
        b'{"model": "a\\ud800", "training_file": "b"}',
        b'{"metadata": {"a\\u0000": "b"}}',
    ],
    ids=range(13),
)
def test_a_body_that_is_no_usable_json_is_400(http: httpx.Client, body: bytes) -> None:
    answer = http.post(JOBS, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = error_of(answer)
    assert error["code"] == "invalid_json"
    assert "sys.set_int" not in error["message"]
    assert len(error["message"]) < 200


def chunks(total: int) -> Iterator[bytes]:
    """A body without a declared length."""
    block = b"x" * 2**16
    for _ in range(total // len(block)):
        yield block


@pytest.mark.parametrize("chunked", [False, True])
def test_a_json_body_past_the_limit_is_413(http: httpx.Client, chunked: bool) -> None:
    size = 2 * JSON_LIMIT
    answer = http.post(JOBS, content=chunks(size) if chunked else b"x" * size)
    assert answer.status_code == 413, answer.text
    assert error_of(answer)["code"] == "too_large"
    assert http.get("/v1/models").status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_an_upload_past_the_limit_is_413_and_leaves_nothing(
    http: httpx.Client, server: Server, chunked: bool
) -> None:
    before = sorted(server.settings.files_dir.glob("*"))
    head = (
        b"--b\r\nContent-Disposition: form-data; name=purpose\r\n\r\nfine-tune\r\n"
        b'--b\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    )
    size = server.settings.max_upload_bytes + 2 * UPLOAD_SLACK

    def body() -> Iterator[bytes]:
        yield head
        yield from chunks(size)
        yield b"\r\n--b--\r\n"

    content = body() if chunked else b"".join(body())
    answer = http.post(
        "/v1/files", content=content, headers={"Content-Type": "multipart/form-data; boundary=b"}
    )
    assert answer.status_code == 413, answer.text
    assert error_of(answer)["code"] == "too_large"
    assert sorted(server.settings.files_dir.glob("*")) == before


def test_a_file_just_past_the_limit_is_413_and_leaves_nothing(http: httpx.Client, server: Server) -> None:
    before = sorted(server.settings.files_dir.glob("*"))
    content = b"x" * (server.settings.max_upload_bytes + 1)
    answer = http.post("/v1/files", files={"file": content}, data={"purpose": "fine-tune"})
    assert answer.status_code == 413
    assert error_of(answer)["param"] == "file"
    assert sorted(server.settings.files_dir.glob("*")) == before


@pytest.mark.parametrize(
    ("request_parts", "param"),
    [
        ({"data": {"purpose": "fine-tune"}}, None),
        ({"files": {"file": b"{}"}}, "purpose"),
        ({"files": {"purpose": b"fine-tune"}}, "file"),
        ({"files": {"file": b""}, "data": {"purpose": "fine-tune"}}, "file"),
        ({"files": {"file": b"{}"}, "data": {"purpose": "x" * 2**17}}, None),
        ({"files": [("file", b"{}"), ("file", b"{}")], "data": {"purpose": "fine-tune"}}, None),
        ({"files": {"file": ("a" * 300, b"{}")}, "data": {"purpose": "fine-tune"}}, "file"),
    ],
    ids=range(7),
)
def test_an_upload_that_lacks_a_part_or_has_a_wrong_one_is_400(
    http: httpx.Client, request_parts: dict[str, object], param: str | None
) -> None:
    answer = http.post("/v1/files", **request_parts)  # type: ignore[arg-type]
    assert answer.status_code == 400, answer.text
    assert error_of(answer)["param"] == param


def test_a_broken_multipart_body_is_400(http: httpx.Client) -> None:
    for content_type in ("multipart/form-data", "multipart/form-data; boundary=b"):
        answer = http.post("/v1/files", content=b"no parts", headers={"Content-Type": content_type})
        assert answer.status_code == 400, answer.text
        assert error_of(answer)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/files/..%2f..%2fapi.log",
        "/v1/files/%2e%2e%2f%2e%2e%2fapi.log/content",
        "/v1/files/..%252f..%252fapi.log/content",
        "/v1/files/;%2f..%2fapi.log/content",
        "/v1/files/file-%00/content",
        "/v1/models/..%2f..%2fetc%2fpasswd",
        "/v1/models/a%00",
        "/v1/fine_tuning/jobs/..%2f..%2fapi.log",
        "/v1/fine_tuning/jobs/a%00/logs",
        "/v1/fine_tuning/jobs/..%2f..%2f/logs",
    ],
)
def test_a_path_that_tries_to_leave_is_404(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert answer.status_code == 404, answer.text
    error_of(answer)


def test_a_file_name_is_only_shown(http: httpx.Client, server: Server) -> None:
    for name in ("../../x.jsonl", "/etc/passwd", "$(reboot).jsonl", "ünï\r\nX-Evil: 1.jsonl"):
        file = http.post(
            "/v1/files", files={"file": (name, b'{"text": "a"}\n')}, data={"purpose": "fine-tune"}
        ).json()
        assert (server.settings.files_dir / file["id"]).is_file()
        content = http.get(f"/v1/files/{file['id']}/content")
        assert content.content == b'{"text": "a"}\n'
        assert "x-evil" not in content.headers
    assert not list(server.settings.data_dir.parent.glob("**/x.jsonl"))


def test_many_ranges_and_long_headers_are_answered_fast(http: httpx.Client, training_file: str) -> None:
    path = f"/v1/files/{training_file}/content"
    ranges = ",".join(f"{start}-{start}" for start in range(5_000))
    answer = http.get(path, headers={"Range": f"bytes={ranges}"}, timeout=5)
    assert answer.status_code < 500
    assert len(answer.content) < 2**20
    long = http.get(path, headers={"X-Long": "x" * 2**20}, timeout=5)
    assert long.status_code == 431
    assert error_of(long)["code"] == "too_large"
