"""Every key that is only checked, passed on or refused: its type, its bounds, its reason."""

import inspect
import json
import math
from typing import Any

import pytest
import torch

from tests.zero_core.config.deepspeed_documents import ARGUMENTS, pointers, problems, settings
from zero_core.config.deepspeed_json import DeepSpeedConfigError, from_deepspeed
from zero_core.config.deepspeed_keys import DEFAULT_LR, MOST_SUGGESTIONS
from zero_core.config.optimizer import ELEMENTWISE_OPTIMIZERS, OptimizerConfig
from zero_core.config.zero import ZeroConfig


def test_auto_needs_a_key_that_hugging_face_fills() -> None:
    found = problems(defaults=ARGUMENTS, zero_optimization={"allgather_bucket_size": "auto"})
    assert '"auto" has no value for this key' in found["/zero_optimization/allgather_bucket_size"]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8", [8], {"n": 8}, math.nan, 10**400])
def test_a_batch_size_is_a_whole_number_above_zero(value: Any) -> None:
    assert list(problems(train_batch_size=value)) == ["/train_batch_size"]


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("loss_scale", -1, "-1 must be at least 0"),
        ("loss_scale", "dynamic", '"dynamic" is not a finite number'),
        ("loss_scale", math.inf, "Infinity is not a finite number"),
        ("loss_scale", 10**400, f"1{'0' * 76}... is not a finite number"),
        ("initial_scale_power", 33, "33 must be at most 32"),
        ("loss_scale_window", 0, "0 must be at least 1"),
        ("hysteresis", 0, "0 must be at least 1"),
        ("min_loss_scale", 0, "0 must be greater than 0"),
        ("enabled", 1, "1 is not true or false"),
        ("consecutive_hysteresis", True, "true is not supported"),
        ("fp16_master_weights_and_grads", True, "true is not supported: master weights are fp32"),
    ],
)
def test_loss_scale_is_checked(key: str, value: Any, reason: str) -> None:
    assert problems(fp16={key: value})[f"/fp16/{key}"].startswith(f"/fp16/{key}: {reason}")


@pytest.mark.parametrize(
    "key",
    [
        "overlap_comm",
        "contiguous_gradients",
        "reduce_scatter",
        "allgather_partitions",
        "stage3_gather_16bit_weights_on_model_save",
    ],
)
def test_what_always_happens_can_be_asked_for_but_not_turned_off(key: str) -> None:
    assert settings(zero_optimization={"stage": 3, key: True}).warnings == ()
    (warning,) = settings(zero_optimization={"stage": 3, key: False}).warnings
    assert warning.startswith(f"/zero_optimization/{key}: no effect: ")
    assert "is not true or false" in problems(zero_optimization={key: 1})[f"/zero_optimization/{key}"]


@pytest.mark.parametrize(
    "key",
    [
        "stage3_max_live_parameters",
        "stage3_max_reuse_distance",
        "stage3_param_persistence_threshold",
        "sub_group_size",
    ],
)
def test_sizes_without_a_counterpart_are_checked_and_said_at_stage_3(key: str) -> None:
    assert pointers(settings(zero_optimization={"stage": 3, key: 1e9}).warnings) == [
        f"/zero_optimization/{key}"
    ]
    assert settings(zero_optimization={"stage": 2, key: 1e9}).warnings == ()
    assert "is not a whole number" in problems(zero_optimization={key: 0.5})[f"/zero_optimization/{key}"]


def test_offload_to_nowhere() -> None:
    section = {
        "stage": 3,
        "offload_optimizer": {"device": "none", "ratio": 1.0, "pipeline_read": True, "nvme_path": "/local"},
        "offload_param": {"device": "none", "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9},
    }
    assert settings(zero_optimization=section).zero == ZeroConfig(stage=3)
    assert settings(zero_optimization={"stage": 3, "offload_param": None}).zero == ZeroConfig(stage=3)


@pytest.mark.parametrize("name", ELEMENTWISE_OPTIMIZERS)
def test_every_hyperparameter_that_torch_has_is_accepted_and_torch_takes_it(name: str) -> None:
    torchs = getattr(torch.optim, name)
    kernels = {"foreach", "fused", "capturable", "differentiable"}
    defaults = {
        key: parameter.default
        for key, parameter in inspect.signature(torchs).parameters.items()
        if key not in kernels | {"params"}
    }
    assert DEFAULT_LR[name] == defaults["lr"]
    # As a JSON file would have them: lists for tuples.
    given = json.loads(json.dumps(defaults | {"maximize": True, "lr": 0.25}))
    if name == "Adam":
        # Another spelling of AdamW, which adam_w_mode spells here.
        del given["decoupled_weight_decay"]
        given["adam_w_mode"] = False
    found = settings(optimizer={"type": name, "params": given}).optimizer
    assert isinstance(found, OptimizerConfig)
    assert found.name == name
    built = torchs([torch.zeros(1)], lr=found.lr, **found.options)
    assert built.defaults["lr"] == 0.25
    assert built.defaults["maximize"] is True
    for key in defaults.keys() - {"lr", "maximize", "weight_decay", "decoupled_weight_decay"}:
        assert built.defaults[key] == defaults[key]


@pytest.mark.parametrize(
    "name",
    [
        "OneBitAdam",
        "ZeroOneAdam",
        "OneBitLamb",
        "Lamb",
        "Lion",
        "Muon",
        "MuAdam",
        "MuAdamW",
        "MuSGD",
        "LBFGS",
    ],
)
def test_optimizers_that_are_refused_say_why(name: str) -> None:
    found = problems(optimizer={"type": name, "params": {"lr": 1e-3, "freeze_step": 400}})
    assert list(found) == ["/optimizer/type"]
    assert f'"{name}" is not supported: ' in found["/optimizer/type"]


@pytest.mark.parametrize(
    ("params", "key", "reason"),
    [
        ({"lr": -1}, "lr", "-1 must be at least 0"),
        ({"betas": [0.9]}, "betas", "is not a list of two numbers"),
        ({"betas": [0.9, 1.0]}, "betas", "at least 0 and less than 1"),
        ({"betas": [0.9, True]}, "betas", "is not a list of two numbers"),
        ({"eps": 0}, "eps", "0 must be greater than 0"),
        ({"weight_decay": -0.1}, "weight_decay", "-0.1 must be at least 0"),
        ({"bias_correction": False}, "bias_correction", "always corrects"),
        ({"max_grad_norm": 1.0}, "max_grad_norm", "write gradient_clipping"),
        ({"momentum": 0.9}, "momentum", "is not a known key"),
        ({"weight_decy": 0.1}, "weight_decy", "did you mean 'weight_decay'?"),
    ],
)
def test_optimizer_parameters_are_checked(params: dict[str, Any], key: str, reason: str) -> None:
    found = problems(optimizer={"type": "AdamW", "params": params})
    assert list(found) == [f"/optimizer/params/{key}"]
    assert reason in found[f"/optimizer/params/{key}"]


@pytest.mark.parametrize(
    ("name", "params", "key", "reason"),
    [
        ("WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps", "0 must be at least 1"),
        ("WarmupLR", {"warmup_max_lr": 0}, "warmup_max_lr", "0 must be greater than 0"),
        ("WarmupLR", {"warmup_max_lr": [1e-3]}, "warmup_max_lr", "a list is not a finite number"),
        ("WarmupLR", {"warmup_min_lr": 0.1}, "warmup_min_lr", "0.1 is more than warmup_max_lr"),
        ("WarmupLR", {"warmup_type": "lin"}, "warmup_type", "did you mean 'linear'?"),
        ("WarmupLR", {"total_num_steps": 9}, "total_num_steps", "is not a known key"),
        ("WarmupDecayLR", {}, "total_num_steps", "is missing"),
        ("WarmupCosineLR", {"total_num_steps": 9, "cos_min_ratio": 1.1}, "cos_min_ratio", "at most 1"),
        (
            "WarmupCosineLR",
            {"total_num_steps": 9, "warmup_min_ratios": 0.1},
            "warmup_min_ratios",
            "did you mean 'warmup_min_ratio'?",
        ),
    ],
)
def test_scheduler_parameters_are_checked(name: str, params: dict[str, Any], key: str, reason: str) -> None:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    found = problems(optimizer=optimizer, scheduler={"type": name, "params": params})
    assert list(found) == [f"/scheduler/params/{key}"]
    assert reason in found[f"/scheduler/params/{key}"]


@pytest.mark.parametrize("name", ["LRRangeTest", "OneCycle"])
def test_schedulers_that_are_refused_say_why(name: str) -> None:
    found = problems(scheduler={"type": name, "params": {"cycle_min_lr": 1e-5}})
    assert list(found) == ["/scheduler/type"]
    assert "is not supported" in found["/scheduler/type"]


@pytest.mark.parametrize(
    ("key", "on", "off"),
    [
        ("wall_clock_breakdown", True, False),
        ("dump_state", True, False),
        ("flops_profiler", {"enabled": True, "module_depth": -1, "output_file": None}, {"enabled": False}),
        ("comms_logger", {"enabled": True, "prof_ops": ["all_reduce"]}, {"enabled": False}),
        ("tensorboard", {"enabled": True, "output_path": "logs", "job_name": "a"}, {"enabled": False}),
        ("wandb", {"enabled": True, "project": "a", "team": "b", "group": "c"}, {"enabled": False}),
        ("comet", {"enabled": True, "project": "a"}, {}),
        ("csv_monitor", {"enabled": True, "output_path": "logs"}, {"enabled": False}),
    ],
)
def test_reports_have_no_effect_and_say_so_when_they_are_on(key: str, on: Any, off: Any) -> None:
    assert pointers(settings(**{key: on}).warnings) == [f"/{key}"]
    assert settings(**{key: off}).warnings == ()
    assert list(problems(**{key: 7})) == [f"/{key}"]


def test_aio_has_no_effect_and_is_checked() -> None:
    aio = {"block_size": 1048576, "queue_depth": 8, "single_submit": False, "overlap_events": True}
    assert pointers(settings(aio=aio).warnings) == ["/aio"]
    assert list(problems(aio={"queue_depth": "8"})) == ["/aio/queue_depth"]


@pytest.mark.parametrize(
    "key",
    [
        "amp",
        "sparse_attention",
        "compression_training",
        "hybrid_engine",
        "data_efficiency",
        "elasticity",
        "autotuning",
        "zenflow",
    ],
)
def test_features_that_are_refused_unless_disabled(key: str) -> None:
    for off in ({"enabled": False, "anything": 1}, {}, False, None):
        assert settings(**{key: off}).warnings == ()
    assert list(problems(**{key: {"enabled": True}})) == [f"/{key}"]
    assert list(problems(**{key: {"mode": "fixed"}})) == [f"/{key}"]


def test_zenflow_is_refused_where_deepspeed_has_it() -> None:
    found = problems(zero_optimization={"stage": 2, "zenflow": {"topk_ratio": 0.1}})
    assert list(found) == ["/zero_optimization/zenflow"]


@pytest.mark.parametrize(
    ("document", "pointer", "meant"),
    [
        ({"zero_optimisation": {}}, "/zero_optimisation", "zero_optimization"),
        ({"bfloat16": {}}, "/bfloat16", "bf16"),
        ({"zero_optimization": {"stge": 3}}, "/zero_optimization/stge", "stage"),
        (
            {"zero_optimization": {"offload_param": {"pin_memry": True}}},
            "/zero_optimization/offload_param/pin_memry",
            "pin_memory",
        ),
        ({"bf16": {"enable": True}}, "/bf16/enable", "enabled"),
        ({"fp16": {"loss_scales": 0}}, "/fp16/loss_scales", "loss_scale"),
        ({"optimizer": {"type": "SGD", "parms": {}}}, "/optimizer/parms", "params"),
        ({"optimizer": {"type": "AdamWW"}}, "/optimizer/type", "AdamW"),
        ({"scheduler": {"type": "WarmupLr1", "params": {}}}, "/scheduler/type", "WarmupLR"),
        ({"activation_checkpointing": {"profiles": True}}, "/activation_checkpointing/profiles", "profile"),
        ({"aio": {"queue_deph": 8}}, "/aio/queue_deph", "queue_depth"),
        ({"wandb": {"projekt": "a"}}, "/wandb/projekt", "project"),
        ({"communication_data_type": "fp61"}, "/communication_data_type", "fp16"),
    ],
)
def test_what_is_unknown_is_refused_with_what_may_be_meant(
    document: dict[str, Any], pointer: str, meant: str
) -> None:
    found = problems(**document)
    assert list(found) == [pointer]
    assert found[pointer].endswith(f"; did you mean '{meant}'?")


def test_pointers_are_escaped_and_nonsense_has_no_suggestion() -> None:
    found = problems(**{"a/b~c": 1, "qqqqqq": 1})
    assert found == {
        "/a~1b~0c": "/a~1b~0c: is not a known key",
        "/qqqqqq": "/qqqqqq: is not a known key",
    }


def test_what_is_no_object_is_refused() -> None:
    with pytest.raises(DeepSpeedConfigError, match="the document: a list is not an object"):
        from_deepspeed([1], world_size=1)  # type: ignore[arg-type]
    assert list(problems(zero_optimization=True, optimizer="AdamW")) == [
        "/zero_optimization",
        "/optimizer",
        "/optimizer/type",
    ]


def test_a_hostile_document_costs_no_more_suggestions_than_a_person_would_read() -> None:
    document = {f"train_batch_size{number}": number for number in range(3000)}
    with pytest.raises(DeepSpeedConfigError) as caught:
        from_deepspeed(document | {"train_batch_size" * 10: 1, "train_batch_size": 1}, world_size=1)
    assert len(caught.value.problems) == 3001
    assert sum(problem.did_you_mean is not None for problem in caught.value.problems) == MOST_SUGGESTIONS
