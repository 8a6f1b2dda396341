"""``shardyard jobs submit``."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from shardyard.cli.files import require_usable
from shardyard.cli.job_view import print_job, require_success
from shardyard.cli.output import AsJson, print_line
from shardyard.cli.progress import follow_job
from shardyard.cli.request import (
    Adapter,
    check_validation,
    method_field,
    training_field,
    without_none,
)
from shardyard.client import Json, Shardyard

FileArgument = Annotated[str, typer.Argument(help="A file to upload, or the id of one that is uploaded.")]

ValidationSplit = Annotated[
    float | None, typer.Option(help="Share of the training file to evaluate on instead.")
]
Method = Annotated[Literal["supervised", "dpo"] | None, typer.Option(help="Learn answers, or preferences.")]
Quantization = Annotated[
    Literal["nf4", "int8"] | None, typer.Option(help="LoRA: how the frozen base is kept.")
]
Merge = Annotated[bool, typer.Option("--merge", help="LoRA: the result is the whole model, not the adapter.")]
MaxTokens = Annotated[
    int | None, typer.Option(help="Tokens that a rank holds at once; speed and memory only.")
]
EvalSamples = Annotated[int | None, typer.Option(help="Prompts of validation to answer at each evaluation.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any training field, as KEY=VALUE with JSON values: lora.alpha=8."),
]


def submit(
    model: Annotated[str, typer.Argument(help="A model of `shardyard models ls`.")],
    training_file: FileArgument,
    validation_file: Annotated[str | None, typer.Option(help="Likewise, to evaluate on.")] = None,
    validation_split: ValidationSplit = None,
    method: Method = None,
    beta: Annotated[float | None, typer.Option(help="DPO: the larger, the less the model moves.")] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Train low-rank adapters, not every weight.")] = False,
    lora_r: Annotated[int | None, typer.Option(help="LoRA: rank of the adapters.")] = None,
    quantization: Quantization = None,
    merge: Merge = False,
    epochs: Annotated[float | None, typer.Option(help="Passes over the training file.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Examples in a step, over all ranks.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak of the schedule.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the order of examples and every draw.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Most tokens of one example.")] = None,
    max_tokens_per_device: MaxTokens = None,
    eval_samples: EvalSamples = None,
    gpus: Annotated[int, typer.Option(help="Ranks, each with a GPU or a CPU slot.")] = 1,
    stage: Annotated[int | None, typer.Option(help="ZeRO stage, 0 to 3.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16.")] = None,
    set_: Settings = None,
    suffix: Annotated[str | None, typer.Option(help="Becomes part of the model's name.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Stay and show the progress.")] = False,
    as_json: AsJson = False,
) -> None:
    """Submit a fine-tuning job."""
    named = {
        "num_train_epochs": epochs,
        "train_batch_size": batch_size,
        "learning_rate": learning_rate,
        "max_length": max_length,
        "per_device_max_tokens": max_tokens_per_device,
        "validation_split": validation_split,
        "eval_samples": eval_samples,
        "zero_stage": stage,
        "precision": precision,
    }
    adapter = Adapter(lora, lora_r, quantization, merge).settings()
    training = training_field(named, adapter, set_ or [])
    check_validation(training, validation_file)
    fields = without_none({"method": method_field(method, beta), "seed": seed, "suffix": suffix})
    with Shardyard() as client:
        training_id = _file_id(client, training_file)
        if validation_file is not None:
            fields["validation_file"] = _file_id(client, validation_file)
        job = client.jobs.submit(model, training_id, training=training, resources={"gpus": gpus}, **fields)
        if watch:
            if not as_json:
                print_line(job["id"])
            job = follow_job(client, job["id"], as_json)
    _show(job, watch, as_json)


def _show(job: Json, watched: bool, as_json: bool) -> None:
    ended_badly = job["status"] == "failed"
    print_job(job, as_json, known=watched or ended_badly)
    if watched or ended_badly:
        require_success(job)


def _file_id(client: Shardyard, given: str) -> str:
    """Upload what is a path; leave alone what is an id."""
    path = Path(given)
    if not path.exists():
        if given.startswith("file-"):
            return given
        raise typer.BadParameter(f"{given} is neither a file here nor the id of an uploaded one (file-...)")
    if not path.is_file():
        raise typer.BadParameter(f"{given} is not a file")
    file = client.files.upload(path)
    require_usable(file)
    file_id: str = file["id"]
    return file_id
