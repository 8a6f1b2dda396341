"""Who may do what: no key, a wrong one, a weak one, and another team's."""

from typing import Any

import httpx
import pytest
from fastapi.routing import iter_route_contexts
from sqlalchemy import text, update

from api.main import app
from jobs.tables import ApiKey, Checkpoint, Model
from tests.api.conftest import Server, TeamOfTest, error_of

OPEN = {"/healthz", "/readyz"}

PROMISED = {
    "POST /v1/files",
    "GET /v1/files",
    "GET /v1/files/{file_id}",
    "DELETE /v1/files/{file_id}",
    "GET /v1/files/{file_id}/content",
    "POST /v1/fine_tuning/jobs",
    "GET /v1/fine_tuning/jobs",
    "GET /v1/fine_tuning/jobs/{job_id}",
    "POST /v1/fine_tuning/jobs/{job_id}/cancel",
    "POST /v1/fine_tuning/jobs/{job_id}/pause",
    "POST /v1/fine_tuning/jobs/{job_id}/resume",
    "GET /v1/fine_tuning/jobs/{job_id}/events",
    "GET /v1/fine_tuning/jobs/{job_id}/checkpoints",
    "GET /v1/fine_tuning/jobs/{job_id}/telemetry",
    "GET /v1/fine_tuning/jobs/{job_id}/attempts",
    "GET /v1/fine_tuning/jobs/{job_id}/logs",
    "GET /v1/models",
    "POST /v1/models",
    "GET /v1/models/{model_id}",
    "DELETE /v1/models/{model_id}",
    "GET /healthz",
    "GET /readyz",
}


def operations() -> list[tuple[str, str]]:
    """Method and path of each operation, of the document and of the router table."""
    documented = {
        (method.upper(), path) for path, methods in app.openapi()["paths"].items() for method in methods
    }
    routed = {
        (method, (route.path or "").replace(":path}", "}"))
        for route in iter_route_contexts(app.routes)
        for method in route.methods or ()
    }
    return sorted(documented | routed)


def guarded() -> list[tuple[str, str]]:
    return [(method, path) for method, path in operations() if path not in OPEN]


def test_the_document_has_exactly_the_promised_routes() -> None:
    document = app.openapi()
    found = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert found == PROMISED
    assert {f"{method} {path}" for method, path in operations()} == PROMISED | {"GET /v1/openapi.json"}


def test_every_reference_in_the_document_leads_somewhere(http: httpx.Client) -> None:
    answer = http.get("/v1/openapi.json")
    schemas = answer.json()["components"]["schemas"]
    references = {part.split('"')[0] for part in answer.text.split("#/components/schemas/")[1:]}
    assert references <= schemas.keys()
    assert {"JobRequest", "JobObject", "ErrorBody"} <= references


@pytest.mark.parametrize(("method", "path"), guarded())
def test_without_a_key_every_route_is_401(server: Server, method: str, path: str) -> None:
    url = server.url + path.replace("{", "").replace("}", "")
    for headers in ({}, {"Authorization": "Bearer"}, {"Authorization": "Basic YTpi"}):
        answer = httpx.request(method, url, headers=headers, content=b"{not json")
        assert answer.status_code == 401, answer.text
        assert answer.headers["www-authenticate"] == "Bearer"
        assert error_of(answer)["code"] == "missing_api_key"
    answer = httpx.request(method, url, headers={"Authorization": "Bearer sk-sy-wrong"})
    assert answer.status_code == 401
    assert error_of(answer)["type"] == "authentication_error"
    assert "sk-sy-wrong" not in answer.text


def test_a_revoked_key_is_401_at_once(server: Server, team: TeamOfTest) -> None:
    http = team.http()
    assert http.get("/v1/models").status_code == 200
    with server.sessions.begin() as session:
        session.execute(update(ApiKey).where(ApiKey.team_id == team.id).values(revoked_at=text("now()")))
    assert http.get("/v1/models").status_code == 401


def test_roles(team: TeamOfTest, training_file: str) -> None:
    job = {"model": "tiny", "training_file": training_file}
    model = {"id": "any", "path": "/nowhere"}
    viewer, member = team.http("viewer"), team.http("member")
    writes: list[tuple[str, str, dict[str, Any]]] = [
        ("POST", "/v1/files", {"files": {"file": b"{}"}, "data": {"purpose": "fine-tune"}}),
        ("DELETE", f"/v1/files/{training_file}", {}),
        ("POST", "/v1/fine_tuning/jobs", {"json": job}),
        ("POST", "/v1/fine_tuning/jobs/any/cancel", {}),
        ("POST", "/v1/fine_tuning/jobs/any/pause", {}),
        ("POST", "/v1/fine_tuning/jobs/any/resume", {}),
        ("DELETE", "/v1/models/any", {}),
    ]
    for method, path, body in [*writes, ("POST", "/v1/models", {"json": model})]:
        answer = viewer.request(method, path, **body)
        assert answer.status_code == 403, (path, answer.text)
        assert error_of(answer)["type"] == "permission_error"
    assert viewer.get(f"/v1/files/{training_file}").status_code == 200
    assert member.post("/v1/models", json=model).status_code == 403
    assert member.post("/v1/fine_tuning/jobs", json=job).status_code == 200
    assert team.http("admin").post("/v1/models", json=model).status_code == 400


def test_another_team_gets_the_404_of_a_missing_id_with_every_verb(
    server: Server, team: TeamOfTest, training_file: str
) -> None:
    http = team.http()
    job_id = http.post("/v1/fine_tuning/jobs", json={"model": "tiny", "training_file": training_file}).json()[
        "id"
    ]
    checkpoint_id, model_id = f"ftckpt_{job_id}", f"ft:tiny:{team.name}::1"
    with server.sessions.begin() as session:
        session.add(Model(id=model_id, team_id=team.id, kind="fine_tuned", path="/exports/a"))
        session.add(
            Checkpoint(
                id=checkpoint_id, job_id=job_id, epoch=1, step=1, path="/c", manifest_sha256="0", bytes=1
            )
        )
    other = server.team()
    stranger = other.http()
    missing = {"file_id": "file-none", "job_id": "ftjob-none", "model_id": "none"}
    theirs = {"file_id": training_file, "job_id": job_id, "model_id": model_id}
    checked = 0
    for method, path in guarded():
        if "{" not in path:
            continue
        for_missing = stranger.request(method, path.format(**missing))
        for_theirs = stranger.request(method, path.format(**theirs))
        assert for_missing.status_code == for_theirs.status_code == 404, path
        said = for_theirs.text
        for name, value in theirs.items():
            said = said.replace(value, missing[name])
        assert said == for_missing.text
        checked += 1
    assert checked == 14
    for body in (
        {"model": "tiny", "training_file": training_file},
        {"model": model_id, "training_file": training_file},
    ):
        assert stranger.post("/v1/fine_tuning/jobs", json=body).status_code == 404
    assert stranger.get("/v1/files").json()["data"] == []
    assert stranger.get("/v1/fine_tuning/jobs").json()["data"] == []
    assert model_id not in stranger.get("/v1/models").text
    for path, cursor in (("/v1/files", training_file), ("/v1/fine_tuning/jobs", job_id)):
        assert stranger.get(path, params={"after": cursor}).status_code == 400
    # Nothing that the stranger tried has changed anything.
    assert http.get(f"/v1/fine_tuning/jobs/{job_id}").json()["status"] == "queued"
    assert http.get(f"/v1/files/{training_file}/content").status_code == 200
    assert http.get(f"/v1/models/{model_id}").status_code == 200
    other.close()


@pytest.mark.parametrize("field", ["team_id", "state", "epoch", "status", "organization_id"])
def test_what_the_server_decides_is_no_field_of_a_request(
    http: httpx.Client, training_file: str, field: str
) -> None:
    answers = [
        http.post("/v1/fine_tuning/jobs", json={"model": "tiny", "training_file": training_file, field: "x"}),
        http.post("/v1/models", json={"id": "other", "path": "/models/other", field: "x"}),
        http.post("/v1/files", files={"file": b"{}"}, data={"purpose": "fine-tune", field: "x"}),
    ]
    for answer in answers:
        assert answer.status_code == 422, answer.text
        assert (error_of(answer)["param"], error_of(answer)["code"]) == (field, "unknown_parameter")


def test_no_key_is_in_the_log_or_the_database(server: Server, team: TeamOfTest) -> None:
    key = team.key("member")
    for secret in (key, key + "x"):
        httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {secret}"})
    assert key not in server.log.read_text()
    with server.sessions.begin() as session:
        rows = session.execute(text("SELECT to_jsonb(k)::text FROM api_keys AS k")).scalars().all()
    assert rows
    assert not [row for row in rows if key in row]
