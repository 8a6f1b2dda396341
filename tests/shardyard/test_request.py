"""What options of ``jobs submit`` become, and which contradict each other."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from shardyard.cli.request import Adapter, check_validation, method_field, training_field
from tests.shardyard.conftest import CommandLine
from tests.shardyard.scripted_server import Answer, Scripted


def adapter(
    wanted: bool = True, r: int | None = None, quantization: str | None = None, merge: bool = False
) -> Adapter:
    return Adapter(wanted, r, quantization, merge)


def test_the_method_is_openais() -> None:
    assert method_field(None, None) is None
    assert method_field("supervised", None) == {"type": "supervised"}
    assert method_field("dpo", None) == {"type": "dpo"}
    assert method_field("dpo", 0.3) == {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.3}}}


def test_lora_says_only_what_was_given() -> None:
    assert adapter(wanted=False).settings() is None
    assert adapter().settings() == {}
    assert adapter(r=8, quantization="nf4", merge=True).settings() == {
        "r": 8,
        "quantization": "nf4",
        "merge": True,
    }


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], {"zero_stage": 2, "lora": {"r": 4}}),
        (["lora.r=8"], {"zero_stage": 2, "lora": {"r": 8}}),
        (
            ["lora.alpha=16", 'lora.target_modules=["q_proj"]', "zero_stage=1"],
            {"zero_stage": 1, "lora": {"r": 4, "alpha": 16, "target_modules": ["q_proj"]}},
        ),
        (["optim_args.momentum=0.9"], {"zero_stage": 2, "lora": {"r": 4}, "optim_args": {"momentum": 0.9}}),
        (["optim=SGD"], {"zero_stage": 2, "lora": {"r": 4}, "optim": "SGD"}),
        (["optim=a=b"], {"zero_stage": 2, "lora": {"r": 4}, "optim": "a=b"}),
        (["lora=null"], {"zero_stage": 2, "lora": None}),
    ],
)
def test_set_goes_into_objects_and_has_the_last_word(pairs: list[str], expected: dict[str, Any]) -> None:
    assert training_field({"zero_stage": 2, "max_length": None}, {"r": 4}, pairs) == expected


@pytest.mark.parametrize("pair", ["r", "=1", "lora.=1", ".r=1", "zero_stage.r=1"])
def test_a_set_that_names_no_field(pair: str) -> None:
    with pytest.raises(typer.BadParameter, match=f"--set {pair}: "):
        training_field({"zero_stage": 2}, None, [pair])


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("--lora-r", adapter(wanted=False, r=8)),
        ("--quantization", adapter(wanted=False, quantization="nf4")),
        ("--merge", adapter(wanted=False, merge=True)),
    ],
)
def test_options_of_lora_without_lora(option: str, given: Adapter) -> None:
    with pytest.raises(typer.BadParameter, match=f"{option} .* add --lora"):
        given.settings()


@pytest.mark.parametrize("method", [None, "supervised"])
def test_beta_without_dpo(method: str | None) -> None:
    with pytest.raises(typer.BadParameter, match="add --method dpo"):
        method_field(method, 0.1)


def test_where_validation_comes_from() -> None:
    for training, file in [
        ({}, None),
        ({}, "v"),
        ({"validation_split": 0.1, "eval_samples": 2}, None),
        ({"eval_samples": 2}, "v"),
        ({"eval_samples": 0}, None),
    ]:
        check_validation(training, file)
    with pytest.raises(typer.BadParameter, match="give one of them"):
        check_validation({"validation_split": 0.1}, "v")
    with pytest.raises(typer.BadParameter, match="add --validation-file or --validation-split"):
        check_validation({"eval_samples": 2}, None)


def test_everything_that_submit_can_be_told(server: Scripted, tmp_path: Path) -> None:
    server.answers = [Answer(200, b'{"id": "ftjob-1", "status": "queued"}')]
    preferences = ["--method", "dpo", "--beta", "0.2", "--seed", "3", "--validation-split", "0.1"]
    adapters = ["--lora", "--lora-r", "4", "--quantization", "int8", "--merge", "--set", "lora.alpha=8"]
    sizes = ["--max-length", "64", "--max-tokens-per-device", "256", "--eval-samples", "2", "--gpus", "2"]
    known = {"SHARDYARD_URL": server.url, "SHARDYARD_API_KEY": "key"}
    options = [*preferences, *adapters, *sizes, "--json"]
    done = CommandLine(tmp_path).run("jobs", "submit", "tiny", "file-1", *options, **known)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["id"] == "ftjob-1"
    (request,) = server.requests
    assert json.loads(request.body) == {
        "model": "tiny",
        "training_file": "file-1",
        "method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2}}},
        "seed": 3,
        "training": {
            "validation_split": 0.1,
            "lora": {"r": 4, "quantization": "int8", "merge": True, "alpha": 8},
            "max_length": 64,
            "per_device_max_tokens": 256,
            "eval_samples": 2,
        },
        "resources": {"gpus": 2},
    }
