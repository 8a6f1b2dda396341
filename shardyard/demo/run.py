"""The main job, end to end: everything that a user would do by hand, over HTTP."""

import hashlib
from pathlib import Path

from shardyard.cli.job_view import require_success
from shardyard.cli.output import console, print_line
from shardyard.cli.progress import watch_job
from shardyard.client import TERMINAL, Json, Shardyard
from shardyard.demo.docstrings import Example, make_examples, write_examples
from shardyard.demo.model import NAME, ask, convert
from shardyard.demo.report import Outcome, Question, report, show_the_way
from shardyard.demo.service import service
from shardyard.errors import DemoFailed, Refused

# The size of the demo: about four minutes of training on 2 cores.
TRAIN_EXAMPLES = 224
VALIDATION_EXAMPLES = 32
RANKS = 2
TRAINING: Json = {
    "num_train_epochs": 1.0,
    "train_batch_size": 8,
    "per_device_max_tokens": 1024,
    "max_length": 192,
    "learning_rate": 1e-4,
    "warmup_steps": 3,
    "save_steps": 10,
    "zero_stage": 3,
    "precision": "fp32",
    "eval_samples": 4,
}
MARK = {"made_by": "shardyard demo"}
"""Metadata of the demo's jobs, so that one that was interrupted is found again."""


def run_demo(data_dir: Path, port: int) -> None:
    """Raises where anything fails, the loss did not fall, or the result does not load."""
    data_dir = data_dir.resolve()
    train, validation = make_examples(TRAIN_EXAMPLES, VALIDATION_EXAMPLES)
    with service(data_dir, port, RANKS) as client:
        _add_base_model(client, data_dir)
        job = _unfinished_job(client) or submit(client, data_dir, train, validation)
        print_line(f"Job {job['id']}: {len(train)} examples, ZeRO stage {TRAINING['zero_stage']}")
        job = watch_job(client, job["id"])
        require_success(job)
        outcome = _outcome(client, job, validation)
        report(outcome)
        show_the_way(client.url, data_dir)
    require_fall(outcome)


def _add_base_model(client: Shardyard, data_dir: Path) -> None:
    with console.status("Converting the base model (once, about half a minute)"):
        path = convert(data_dir / "models")
    model = client.models.add(NAME, path)
    print_line(f"Base model {model['id']}: {model['parameters']:,} parameters, in {path}")


def _unfinished_job(client: Shardyard) -> Json | None:
    """The job of a demo that was interrupted: it goes on from its last checkpoint."""
    return next((job for job in client.jobs.list(MARK) if job["status"] not in TERMINAL), None)


def submit(client: Shardyard, data_dir: Path, train: list[Example], validation: list[Example]) -> Json:
    directory = data_dir / "demo"
    directory.mkdir(exist_ok=True)
    files: dict[str, str] = {}
    for name, examples in (("training_file", train), ("validation_file", validation)):
        path = directory / f"{name}.jsonl"
        write_examples(path, examples)
        files[name] = uploaded(client, path)
    fields: Json = {**files, "model": NAME, "suffix": "demo", "metadata": MARK, "training": TRAINING}
    try:
        return client.jobs.submit(**fields, resources={"gpus": RANKS})
    except Refused as error:
        if error.code != "too_many_gpus":
            raise
        print_line("This machine has one GPU: one rank instead of two")
        return client.jobs.submit(**fields, resources={"gpus": 1})


def uploaded(client: Shardyard, path: Path) -> str:
    """The id of a file with this content; uploaded only if the server has none."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    known = (file for file in client.files.list() if file["sha256"] == digest)
    file_id: str = (next(known, None) or client.files.upload(path))["id"]
    return file_id


def _outcome(client: Shardyard, job: Json, validation: list[Example]) -> Outcome:
    telemetry = client.jobs.telemetry(job["id"])
    losses = [row["valid_loss"] for row in telemetry["metrics"] if row["valid_loss"] is not None]
    if len(losses) < 2:
        raise DemoFailed(f"{job['id']} reported {len(losses)} validation losses instead of two")
    last_step = max(row["step"] for row in telemetry["memory"])
    export = Path(next(m["path"] for m in client.models.list() if m["id"] == job["fine_tuned_model"]))
    questions = answered(list(client.jobs.events(job["id"])), validation)
    with console.status("Loading the fine-tuned model with transformers, and asking it once more"):
        again = ask(export, questions[0].question)
    return Outcome(
        job=job,
        loss_before=losses[0],
        loss_after=losses[-1],
        memory=[row for row in telemetry["memory"] if row["step"] == last_step],
        questions=questions,
        again=again,
        checkpoint=Path(next(client.jobs.checkpoints(job["id"]))["path"]),
        export=export,
    )


def answered(events: list[Json], validation: list[Example]) -> list[Question]:
    """What the model said before training and at its end, of the questions that the job asked it."""
    said = [event["data"] for event in events if "answer" in (event["data"] or {})]
    first, last = min(each["step"] for each in said), max(each["step"] for each in said)
    questions = []
    for example in validation:
        answers = {each["step"]: each["answer"] for each in said if example.question in each["prompt"]}
        if answers:
            questions.append(Question(example.question, example.answer, answers[first], answers[last]))
    return questions


def require_fall(outcome: Outcome) -> None:
    # Not "rose or stayed": a loss that is no number has not fallen either.
    if not outcome.loss_after < outcome.loss_before:
        raise DemoFailed(
            f"the validation loss did not fall: {outcome.loss_before:.4f} before, "
            f"{outcome.loss_after:.4f} after"
        )
