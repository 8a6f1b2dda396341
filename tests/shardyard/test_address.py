"""Where the client looks for its server."""

import json
from pathlib import Path

import pytest

from shardyard.address import Address, data_dir, find
from shardyard.errors import NotConfigured


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("SHARDYARD_URL", "SHARDYARD_API_KEY", "SHARDYARD_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def write(directory: Path) -> None:
    directory.mkdir()
    (directory / "client.json").write_text(json.dumps({"url": "http://a/", "api_key": "key-a"}))


def test_the_data_directory_here(tmp_path: Path) -> None:
    write(tmp_path / ".shardyard")
    assert find() == Address("http://a", "key-a")


def test_the_data_directory_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDYARD_DATA_DIR", str(tmp_path / "elsewhere"))
    write(data_dir())
    assert find() == Address("http://a", "key-a")


def test_the_environment_comes_before_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / ".shardyard")
    monkeypatch.setenv("SHARDYARD_URL", "http://b")
    assert find() == Address("http://b", "key-a")
    monkeypatch.setenv("SHARDYARD_API_KEY", "key-b")
    assert find() == Address("http://b", "key-b")


def test_arguments_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDYARD_URL", "http://b")
    monkeypatch.setenv("SHARDYARD_API_KEY", "key-b")
    assert find("http://c", "key-c") == Address("http://c", "key-c")


def test_no_server_is_known() -> None:
    with pytest.raises(NotConfigured, match=r"client\.json does not exist\. Start one with `shardyard up`"):
        find()


@pytest.mark.parametrize("content", ["", "[]", "{}", '"text"', '{"url": "http://a"}'])
def test_a_client_file_that_says_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / ".shardyard").mkdir()
    (tmp_path / ".shardyard" / "client.json").write_text(content)
    with pytest.raises(NotConfigured, match="has no url and api_key"):
        find()
