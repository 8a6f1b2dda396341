"""The command line as a process, against a real stack: what it prints where, and how it exits."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shardyard.client import Shardyard
from shardyard.stack.stack import Stack
from tests.shardyard.conftest import MODEL, CommandLine, free_port

SHORT = ["--epochs", "1", "--batch-size", "8", "--set", "max_length=128", "--learning-rate", "0.003"]


def parsed(done: subprocess.CompletedProcess[str], code: int = 0) -> Any:
    """What a command printed for programs: one JSON value, and nothing else."""
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="session")
def finished_job(stack: Stack, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A job that the command line submitted and watched to its end."""
    from tests.tiny_model import write_chat_file

    directory = tmp_path_factory.mktemp("data")
    training = write_chat_file(directory / "train.jsonl", examples=32)
    validation = write_chat_file(directory / "valid.jsonl", examples=10, seed=1)
    command = CommandLine(stack.data_dir)
    parsed(command.run("models", "add", MODEL, str(tiny_model), "--json"))
    options = ["--validation-file", str(validation), "--gpus", "2", "--stage", "3", "--precision", "fp32"]
    named = ["--suffix", "sums", "--watch", "--json"]
    job = parsed(command.run("jobs", "submit", MODEL, str(training), *SHORT, *options, *named))
    assert isinstance(job, dict)
    return job


def test_a_job_from_two_files_to_a_model(finished_job: dict[str, Any], client: Shardyard) -> None:
    assert finished_job["status"] == "succeeded"
    assert finished_job["fine_tuned_model"] in {model["id"] for model in client.models.list()}
    assert ":sums:" in finished_job["fine_tuned_model"]
    resolved = client.jobs.show(finished_job["id"])["resolved_config"]
    chosen = {
        "num_train_epochs": 1.0,
        "train_batch_size": 8,
        "learning_rate": 0.003,
        "max_length": 128,
        "zero_stage": 3,
        "precision": "fp32",
    }
    assert chosen.items() <= resolved["training"].items()
    assert resolved["resources"] == {"gpus": 2}


def test_a_watcher_sees_every_step_and_rank(finished_job: dict[str, Any], client: Shardyard) -> None:
    (update,) = client.jobs.watch(finished_job["id"])
    assert [metric["step"] for metric in update.metrics] == [0, 1, 2, 3, 4]
    assert {(row["step"], row["rank"]) for row in update.memory} == {
        (step, rank) for step in range(1, 5) for rank in range(2)
    }
    losses = [m["valid_loss"] for m in update.metrics if m["valid_loss"] is not None]
    assert losses[-1] < losses[0]
    assert len(list(client.jobs.checkpoints(finished_job["id"]))) == 1
    assert any("succe" in event["message"].lower() for event in client.jobs.events(finished_job["id"]))
    (results,) = update.job["result_files"]
    assert client.files.content(results).startswith(b"step,train_loss")


@pytest.mark.parametrize(
    "arguments",
    [
        ("files", "ls"),
        ("jobs", "ls"),
        ("models", "ls"),
        ("jobs", "show", "{job}"),
        ("jobs", "logs", "{job}"),
        ("jobs", "events", "{job}"),
        ("jobs", "results", "{job}"),
    ],
)
def test_every_listing_for_programs_and_for_people(
    finished_job: dict[str, Any], command: CommandLine, arguments: tuple[str, ...]
) -> None:
    named = [argument.format(job=finished_job["id"]) for argument in arguments]
    found = parsed(command.run(*named, "--json"))
    assert found
    shown = command.run(*named)
    assert shown.returncode == 0
    assert shown.stderr == ""
    if named[1] == "ls":
        assert isinstance(found, list)
        # Ids are whole, however narrow the terminal.
        assert all(item["id"] in shown.stdout for item in found)


def test_watching_a_job_that_has_ended(finished_job: dict[str, Any], command: CommandLine) -> None:
    watched = command.run("jobs", "watch", finished_job["id"])
    assert watched.returncode == 0
    assert "4/4" in watched.stdout
    assert finished_job["fine_tuned_model"] in watched.stdout


def test_the_events_of_a_job(finished_job: dict[str, Any], command: CommandLine, client: Shardyard) -> None:
    everything = list(client.jobs.events(finished_job["id"]))[::-1]
    assert len(everything) > 3
    newest = parsed(command.run("jobs", "events", finished_job["id"], "--limit", "3", "--json"))
    assert newest == everything[-3:]
    followed = command.run("jobs", "events", finished_job["id"], "--limit", "1000", "--follow")
    assert followed.returncode == 0
    assert len(followed.stdout.splitlines()) == len(everything)
    assert everything[-1]["message"] in followed.stdout.splitlines()[-1]
    assert client.jobs.events_since(finished_job["id"], everything[-3]["id"]) == everything[-2:]
    assert list(client.jobs.follow_events(finished_job["id"], everything[1]["id"])) == everything[2:]


def test_the_results_of_a_job(
    finished_job: dict[str, Any], command: CommandLine, client: Shardyard, tmp_path: Path
) -> None:
    content = client.files.content(finished_job["result_files"][0])
    assert command.run("jobs", "results", finished_job["id"]).stdout.encode() == content
    written = command.run("jobs", "results", finished_job["id"], "--output", str(tmp_path / "results.csv"))
    assert written.stdout == f"{tmp_path / 'results.csv'}\n"
    assert (tmp_path / "results.csv").read_bytes() == content
    rows = parsed(command.run("jobs", "results", finished_job["id"], "--json"))
    metrics = client.jobs.telemetry(finished_job["id"])["metrics"]
    figures = ("step", "train_loss", "valid_loss")
    assert [[row[name] for name in figures] for row in rows] == [
        [metric[name] for name in figures] for metric in metrics
    ]
    nowhere = command.run("jobs", "results", finished_job["id"], "--output", str(tmp_path / "no" / "x"))
    assert nowhere.returncode == 1
    assert "can't be written" in nowhere.stderr


def test_the_checkpoints_of_a_job(
    finished_job: dict[str, Any], command: CommandLine, client: Shardyard
) -> None:
    (checkpoint,) = client.jobs.checkpoints(finished_job["id"])
    assert parsed(command.run("checkpoints", "ls", finished_job["id"], "--json")) == [checkpoint]
    header, row = command.run("checkpoints", "ls", finished_job["id"]).stdout.splitlines()
    assert header.split()[:2] == ["STEP", "MODEL"]
    assert row.split()[:2] == ["4", checkpoint["fine_tuned_model_checkpoint"]]


def test_a_job_that_fails_says_why_once(command: CommandLine, chat_file: Path) -> None:
    options = ["--epochs", "1", "--batch-size", "2", "--max-length", "64", "--gpus", "2", "--seed", "7"]
    diverging = ["--learning-rate", "1e30", "--precision", "fp32", "--set", "max_grad_norm=null"]
    done = command.run("jobs", "submit", MODEL, str(chat_file), *options, *diverging, "--watch")
    assert done.returncode == 1
    assert "nan_loss" not in done.stdout
    *warnings, why = done.stderr.splitlines()
    assert "nan_loss" in why
    job = parsed(command.run("jobs", "show", done.stdout.split()[0], "--json"))
    # Examples of the file have nothing to learn within so few tokens.
    assert warnings == [f"warning: {warning}" for warning in job["warnings"]]
    assert any("were left out" in warning for warning in warnings)
    assert (job["status"], job["seed"]) == ("failed", 7)
    assert done.stderr.count(job["error"]["message"].rstrip(".")) == 1
    no_results = command.run("jobs", "results", job["id"])
    assert (no_results.returncode, no_results.stdout) == (1, "")
    assert "it is failed" in no_results.stderr
    logs = command.run("jobs", "logs", job["id"])
    for rank in range(2):
        assert f"[rank {rank}] Traceback (most recent call last):" in logs.stdout


def test_uploading(command: CommandLine, chat_file: Path, client: Shardyard) -> None:
    file = parsed(command.run("files", "upload", str(chat_file), "--json"))
    assert isinstance(file, dict)
    assert client.files.content(file["id"]) == chat_file.read_bytes()


def test_a_file_is_shown_and_deleted(command: CommandLine, chat_file: Path, client: Shardyard) -> None:
    content = chat_file.read_bytes().replace(b'{"messages"', b'{"source": "x", "messages"')
    chat_file.write_bytes(content)
    uploaded = command.run("files", "upload", str(chat_file))
    file_id = uploaded.stdout.split()[0]
    warning = "the column 'source' is not used (32 lines, the first is 1)"
    assert f"warning: {warning}" in uploaded.stdout
    shown = command.run("files", "show", file_id)
    assert warning in shown.stdout
    assert "chat" in shown.stdout
    assert parsed(command.run("files", "show", file_id, "--json"))["examples"] == 32
    other = client.files.upload(chat_file)["id"]
    deleted = command.run("files", "rm", other, file_id, "file-none", "--json")
    assert [file["id"] for file in parsed(deleted, code=4)] == [other, file_id]
    assert "file-none" in deleted.stderr
    assert not {other, file_id} & {file["id"] for file in client.files.list()}


def test_a_file_with_a_wrong_line_is_named_and_not_trained_on(
    command: CommandLine, tmp_path: Path, client: Shardyard
) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text('{"text": "right"}\n{"text": \n')
    uploaded = command.run("files", "upload", str(path))
    assert uploaded.returncode == 1
    assert "wrong.jsonl" in uploaded.stderr
    assert "2" in uploaded.stderr
    jobs_before = list(client.jobs.list())
    submitted = command.run("jobs", "submit", MODEL, str(path))
    assert submitted.returncode == 1
    assert "can't be trained on" in submitted.stderr
    assert list(client.jobs.list()) == jobs_before


@pytest.mark.parametrize(
    "arguments",
    [
        ("files", "upload", "there-is-no-such-file.jsonl"),
        ("jobs", "submit", MODEL, "there-is-no-such-file.jsonl"),
        ("jobs", "submit", MODEL, "."),
        ("jobs", "submit", MODEL, "file-1", "--set", "no-equals-sign"),
        ("jobs", "submit", MODEL, "file-1", "--beta", "0.1"),
        ("jobs", "submit", MODEL, "file-1", "--method", "rlhf"),
        ("jobs", "submit", MODEL, "file-1", "--quantization", "nf4"),
        ("jobs", "submit", MODEL, "file-1", "--eval-samples", "2"),
        ("jobs", "submit", MODEL),
        ("jobs", "fly"),
    ],
)
def test_wrong_usage(command: CommandLine, arguments: tuple[str, ...]) -> None:
    done = command.run(*arguments, "--json") if arguments[-1] != "fly" else command.run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("jobs", "submit", "no-such-model", "{file}"), "The model 'no-such-model' does not exist"),
        (("jobs", "submit", MODEL, "file-none"), "there is no file 'file-none'"),
        (("jobs", "submit", MODEL, "{file}", "--gpus", "64"), "resources.gpus"),
        (("jobs", "submit", MODEL, "{file}", "--set", "learning_rat=1"), "did you mean 'learning_rate'?"),
        (("jobs", "submit", MODEL, "{file}", "--stage", "4"), "training.zero_stage"),
        (("jobs", "show", "ftjob-none"), "ftjob-none"),
        (("jobs", "cancel", "ftjob-none"), "ftjob-none"),
        (("models", "add", "nothing", "/there/is/no/such/model"), "/there/is/no/such/model"),
    ],
)
def test_what_the_server_refuses(
    command: CommandLine, client: Shardyard, chat_file: Path, arguments: tuple[str, ...], message: str
) -> None:
    file = client.files.upload(chat_file)
    done = command.run(*(argument.format(file=file["id"]) for argument in arguments), "--json")
    assert done.returncode == 4
    assert done.stdout == ""
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_no_server(command: CommandLine, tmp_path: Path) -> None:
    nobody = command.run("jobs", "ls", SHARDYARD_URL=f"http://127.0.0.1:{free_port()}")
    unknown = command.run("jobs", "ls", SHARDYARD_DATA_DIR=str(tmp_path))
    for done in (nobody, unknown):
        assert (done.returncode, done.stdout) == (3, "")
        assert "`shardyard up`" in done.stderr


def test_a_wrong_key(command: CommandLine) -> None:
    done = command.run("jobs", "ls", SHARDYARD_API_KEY="sk-wrong")
    assert done.returncode == 4
    assert "sk-wrong" not in done.stderr


def test_stopping_to_watch_leaves_the_job_alone(
    command: CommandLine, client: Shardyard, chat_file: Path
) -> None:
    file = client.files.upload(chat_file)
    job = client.jobs.submit(MODEL, file["id"], training={"max_steps": 100_000, "max_length": 64})
    with command.start("jobs", "watch", job["id"]) as watcher:
        assert watcher.stdout is not None
        assert watcher.stdout.readline()
        os.kill(watcher.pid, signal.SIGINT)
        _, err = watcher.communicate(timeout=30)
    assert watcher.returncode == 130
    assert "the job goes on" in err
    assert client.jobs.show(job["id"])["status"] in ("queued", "running")
    cancelled = command.run("jobs", "cancel", job["id"], "--json")
    assert cancelled.returncode == 0
    watched = command.run("jobs", "watch", job["id"], "--json")
    assert parsed(watched, code=1)["status"] == "cancelled"
    assert job["id"] in watched.stderr


def test_help_tells_the_exit_codes(command: CommandLine) -> None:
    done = command.run("--help", COLUMNS="200")
    assert "3 no server answers; 4 the server refused" in done.stdout
    assert {"up", "demo", "files", "jobs", "checkpoints", "models"} <= set(done.stdout.split())
