"""One server process for all tests of this folder; teams keep them apart, as they keep users apart."""

import json
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI
from safetensors.numpy import save_file
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.orm import Session, sessionmaker

from jobs.database import make_sessions
from jobs.ids import new_id
from jobs.keys import Role, create_key
from jobs.models import add_base_model
from jobs.settings import Settings
from jobs.tables import Team
from tests.tiny_model import write_chat_file

STARTS_WITHIN_SECONDS = 30.0


@dataclass
class Server:
    """A running API and what lies behind it."""

    url: str
    settings: Settings
    sessions: sessionmaker[Session]
    process: subprocess.Popen[bytes]
    log: Path

    def team(self) -> "TeamOfTest":
        with self.sessions.begin() as session:
            team = Team(id=new_id("team-"), name=f"team-{uuid.uuid4().hex[:12]}")
            session.add(team)
            return TeamOfTest(self, team.id, team.name)


@dataclass
class TeamOfTest:
    """A team with its keys, and clients that use them."""

    server: Server
    id: str
    name: str
    _clients: list[Any] = field(default_factory=list)

    def key(self, role: Role = "admin") -> str:
        with self.server.sessions.begin() as session:
            return create_key(session, self.id, f"a {role}'s", role)

    def http(self, role: Role = "admin") -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.key(role)}"}
        client = httpx.Client(base_url=self.server.url, headers=headers, timeout=30)
        self._clients.append(client)
        return client

    def openai(self, role: Role = "admin") -> OpenAI:
        client = OpenAI(base_url=f"{self.server.url}/v1", api_key=self.key(role), timeout=30, max_retries=0)
        self._clients.append(client)
        return client

    def close(self) -> None:
        for client in self._clients:
            client.close()


@pytest.fixture(scope="session")
def api_database_url(postgres_url: str, template_database: str) -> Iterator[str]:
    name = f"api_{uuid.uuid4().hex}"
    engine = create_engine(postgres_url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name} TEMPLATE {template_database}"))
        yield make_url(postgres_url).set(database=name).render_as_string(hide_password=False)
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    engine.dispose()


@pytest.fixture(scope="session")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that describe a model: the API judges them and never loads one."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    path.mkdir()
    (path / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    )
    (path / "tokenizer.json").write_text("{}")
    save_file({"embedding": np.zeros((16, 8), np.float32)}, path / "model.safetensors")
    return path


@pytest.fixture(scope="session")
def server(
    api_database_url: str, valkey_url: str, base_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    settings = Settings(
        database_url=api_database_url,
        redis_url=valkey_url,
        data_dir=tmp_path_factory.mktemp("data"),
        min_free_bytes=0,
        max_upload_bytes=4 * 2**20,
    )
    with running(settings) as server:
        with server.sessions.begin() as session:
            add_base_model(session, "tiny", str(base_model))
        yield server


@pytest.fixture
def team(server: Server) -> Iterator[TeamOfTest]:
    team = server.team()
    yield team
    team.close()


@pytest.fixture
def http(team: TeamOfTest) -> httpx.Client:
    return team.http()


@pytest.fixture
def openai(team: TeamOfTest) -> OpenAI:
    return team.openai()


@pytest.fixture
def training_file(openai: OpenAI, tmp_path: Path) -> str:
    """A good file's id."""
    return openai.files.create(file=write_chat_file(tmp_path / "train.jsonl", 12), purpose="fine-tune").id


@contextmanager
def running(settings: Settings) -> Iterator[Server]:
    """A server process with these settings, from when it answers until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "DATABASE_URL": settings.database_url,
        "REDIS_URL": settings.redis_url,
        "SHARDYARD_DATA_DIR": str(settings.data_dir),
        "SHARDYARD_MIN_FREE_BYTES": str(settings.min_free_bytes),
        "SHARDYARD_MAX_UPLOAD_BYTES": str(settings.max_upload_bytes),
    }
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    log = settings.data_dir / f"api-{port}.log"
    command = [sys.executable, "-m", "uvicorn", "api.main:app", "--port", str(port)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    sessions = make_sessions(settings.database_url)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_it_answers(url, process, log)
        yield Server(url, settings, sessions, process, log)
    finally:
        process.terminate()
        process.wait(timeout=30)
        sessions.kw["bind"].dispose()


def _wait_until_it_answers(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + STARTS_WITHIN_SECONDS
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        try:
            if httpx.get(f"{url}/healthz", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.01)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error inside a refusal, after checking that it has OpenAI's shape."""
    body = response.json()
    assert body.keys() == {"error"}, body
    assert body["error"].keys() == {"message", "type", "param", "code"}, body
    assert response.headers["x-request-id"].startswith("req_")
    error: dict[str, Any] = body["error"]
    return error
