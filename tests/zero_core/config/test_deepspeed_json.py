"""Documents as people have them, each rule alone, and schedules against values worked out by hand."""

import json
import math
import subprocess
import sys
from typing import Any

import pytest

from tests.zero_core.config.deepspeed_documents import ARGUMENTS, ZERO_2, ZERO_3, pointers, problems, settings
from zero_core.config.deepspeed_json import (
    AutoValues,
    DeepSpeedConfigError,
    SchedulerSettings,
    from_deepspeed,
)
from zero_core.config.offload import OffloadConfig, Tier
from zero_core.config.optimizer import AdamWConfig, OptimizerConfig
from zero_core.config.zero import LossScaleConfig, Precision, ZeroConfig


def test_hugging_faces_zero_2_file() -> None:
    found = from_deepspeed(json.loads(ZERO_2.replace("DEVICE", "none")), world_size=8, defaults=ARGUMENTS)
    assert found.zero == ZeroConfig(
        stage=2,
        precision="bf16",
        gradient_accumulation_steps=2,
        gradient_clipping=1.0,
        reduce_bucket_size=500_000_000,
        allgather_bucket_size=500_000_000,
    )
    assert found.optimizer == AdamWConfig(lr=3e-5, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.01)
    assert found.scheduler == SchedulerSettings(
        "WarmupLR",
        {"warmup_min_lr": 0.0, "warmup_max_lr": 3e-5, "warmup_num_steps": 50, "warmup_type": "log"},
    )
    assert (found.train_batch_size, found.micro_batch_size) == (64, 4)
    assert found.gradient_checkpointing is False
    assert pointers(found.warnings) == ["/zero_optimization/round_robin_gradients", "/steps_per_print"]


def test_hugging_faces_zero_3_file() -> None:
    found = from_deepspeed(json.loads(ZERO_3.replace("DEVICE", "none")), world_size=8, defaults=ARGUMENTS)
    assert found.zero == ZeroConfig(
        stage=3,
        precision="bf16",
        gradient_accumulation_steps=2,
        gradient_clipping=1.0,
        reduce_bucket_size=1_048_576,
        prefetch_bucket_size=943_718,
    )
    assert found.scheduler is not None
    assert found.scheduler.name == "WarmupDecayLR"
    assert found.scheduler.params["total_num_steps"] == 1000
    assert pointers(found.warnings) == [
        "/zero_optimization/stage3_max_live_parameters",
        "/zero_optimization/stage3_max_reuse_distance",
        "/zero_optimization/stage3_param_persistence_threshold",
        "/zero_optimization/sub_group_size",
        "/steps_per_print",
    ]


@pytest.mark.parametrize(("device", "tier"), [("cpu", "host"), ("nvme", "disk")])
def test_offload_becomes_tiers(device: str, tier: Tier) -> None:
    found = from_deepspeed(json.loads(ZERO_3.replace("DEVICE", device)), world_size=2, defaults=ARGUMENTS)
    assert found.zero.offload == OffloadConfig(optimizer=tier, parameters=tier)


def test_what_is_said_of_offload_that_differs_from_deepspeeds() -> None:
    disk = {"device": "nvme", "nvme_path": "/local"}
    found = settings(
        zero_optimization={
            "stage": 3,
            "offload_optimizer": disk | {"ratio": 0.3},
            "offload_param": {"device": "nvme", "nvme_path": "/other", "max_in_cpu": 1e9},
        }
    )
    assert found.zero.offload == OffloadConfig("disk", "disk")
    assert found.zero.scratch_directory == "/local"
    section = "/zero_optimization"
    assert pointers(found.warnings) == [
        f"{section}/offload_optimizer/ratio",
        f"{section}/offload_param/max_in_cpu",
        f"{section}/offload_param/nvme_path",
    ]
    found = settings(zero_optimization={"stage": 2, "offload_param": {"device": "cpu"}})
    assert found.zero.offload == OffloadConfig()
    assert pointers(found.warnings) == [f"{section}/offload_param"]
    found = settings(zero_optimization={"stage": 3, "offload_param": {"device": "nvme"}})
    assert found.zero.offload == OffloadConfig("disk", "disk")
    assert pointers(found.warnings) == [f"{section}/offload_param/nvme_path", f"{section}/offload_param"]
    hpz = {"stage": 3, "zero_hpz_partition_size": 2, "offload_param": {"device": "cpu"}}
    assert list(problems(2, train_batch_size=2, zero_optimization=hpz)) == [
        f"{section}/zero_hpz_partition_size"
    ]


def test_without_arguments_every_auto_names_what_it_misses() -> None:
    found = problems(**json.loads(ZERO_3.replace("DEVICE", "none")))
    missing = {pointer: text.split(" takes ")[1].split(",")[0] for pointer, text in found.items()}
    zero, optimizer, scheduler = "/zero_optimization", "/optimizer/params", "/scheduler/params"
    assert missing == {
        "/train_micro_batch_size_per_gpu": "micro_batch_size",
        "/gradient_accumulation_steps": "gradient_accumulation_steps",
        "/train_batch_size": "micro_batch_size",
        f"{zero}/reduce_bucket_size": "hidden_size",
        f"{zero}/stage3_prefetch_bucket_size": "hidden_size",
        f"{zero}/stage3_param_persistence_threshold": "hidden_size",
        "/gradient_clipping": "max_grad_norm",
        "/bf16/enabled": "precision",
        "/fp16/enabled": "precision",
        f"{optimizer}/lr": "learning_rate",
        f"{optimizer}/betas": "betas",
        f"{optimizer}/eps": "eps",
        f"{optimizer}/weight_decay": "weight_decay",
        f"{scheduler}/warmup_max_lr": "learning_rate",
        f"{scheduler}/warmup_num_steps": "warmup_steps",
        f"{scheduler}/total_num_steps": "total_steps",
    }


def test_auto_below_stage_3_needs_no_width_for_what_stage_3_alone_uses() -> None:
    keys = {"stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    assert settings(zero_optimization={"stage": 2} | keys).zero == ZeroConfig(stage=2)


def test_auto_warmup_of_no_steps_is_one_step() -> None:
    scheduler = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}}
    found = settings(defaults=AutoValues(warmup_steps=0, total_steps=7), scheduler=scheduler).scheduler
    assert found is not None
    assert found.params == {
        "warmup_num_steps": 1,
        "warmup_type": "log",
        "total_num_steps": 7,
        "warmup_min_ratio": 0.0,
        "cos_min_ratio": 0.0001,
    }


BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((48, 4, 3), (48, 4, 3)),
        ((48, 4, None), (48, 4, 3)),
        ((48, None, 3), (48, 4, 3)),
        ((None, 4, 3), (48, 4, 3)),
        ((48, None, None), (48, 12, 1)),
        ((None, 4, None), (16, 4, 1)),
        (("auto", 2, 3), (24, 2, 3)),
        (("auto", "auto", "auto"), (32, 4, 2)),
        ((64, "auto", None), (64, 4, 4)),
    ],
)
def test_two_batch_sizes_give_the_third(given: tuple[Any, ...], expected: tuple[int, int, int]) -> None:
    document = {key: value for key, value in zip(BATCH_KEYS, given, strict=True) if value is not None}
    found = from_deepspeed(document, world_size=4, defaults=ARGUMENTS)
    accumulation = found.zero.gradient_accumulation_steps
    assert (found.train_batch_size, found.micro_batch_size, accumulation) == expected


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        ((50, 4, 3), "50 is not micro-batch 4 x accumulation 3 x 4 ranks = 48"),
        ((50, 4, None), "50 is not micro-batch 4 x accumulation 3 x 4 ranks = 48"),
        ((50, None, 3), "50 is not micro-batch 4 x accumulation 3 x 4 ranks = 48"),
        ((3, None, None), "3 is not micro-batch 0 x accumulation 1 x 4 ranks = 0"),
        ((3, 4, None), "3 is not micro-batch 4 x accumulation 0 x 4 ranks = 0"),
        ((None, None, 2), "is missing, and so is train_micro_batch_size_per_gpu"),
        ((None, None, None), "is missing, and so is train_micro_batch_size_per_gpu"),
    ],
)
def test_batch_sizes_that_disagree_are_refused_with_their_numbers(
    given: tuple[int | None, ...], numbers: str
) -> None:
    document = {key: value for key, value in zip(BATCH_KEYS, given, strict=True) if value is not None}
    with pytest.raises(DeepSpeedConfigError, match=f"^/train_batch_size: {numbers}"):
        from_deepspeed(document, world_size=4)


def test_a_world_of_no_ranks_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="world_size: 0 must be at least 1"):
        from_deepspeed({"train_batch_size": 1}, world_size=0)


@pytest.mark.parametrize(
    ("bf16", "fp16", "expected"),
    [
        (None, None, "fp32"),
        (True, None, "bf16"),
        (True, False, "bf16"),
        (False, True, "fp16"),
        ("auto", "auto", "bf16"),
        ("auto", False, "bf16"),
        (False, "auto", "fp32"),
    ],
)
def test_precision(bf16: Any, fp16: Any, expected: Precision) -> None:
    sections = {"bf16": {"enabled": bf16}, "fp16": {"enabled": fp16}}
    assert settings(defaults=ARGUMENTS, **sections).zero.precision == expected


def test_both_precisions_are_refused() -> None:
    found = problems(bf16={"enabled": True}, fp16={"enabled": True})
    assert found == {"/fp16/enabled": "/fp16/enabled: is true, and so is /bf16/enabled: turn one off"}


def test_loss_scale() -> None:
    assert settings(fp16={"enabled": True, "loss_scale": 0}).zero.loss_scale == LossScaleConfig()
    given = {
        "enabled": True,
        "loss_scale": 128,
        "initial_scale_power": 12,
        "loss_scale_window": 500,
        "hysteresis": 1,
        "min_loss_scale": 4,
        "consecutive_hysteresis": False,
        "fp16_master_weights_and_grads": False,
    }
    assert settings(fp16=given).zero.loss_scale == LossScaleConfig(128, 12, 500, 1, 4)


@pytest.mark.parametrize(("given", "expected"), [(0, None), (0.5, 0.5), ("auto", 1.0), (None, None)])
def test_gradient_clipping(given: Any, expected: float | None) -> None:
    assert settings(defaults=ARGUMENTS, gradient_clipping=given).zero.gradient_clipping == expected


def test_auto_clipping_of_0_never_clips() -> None:
    found = settings(defaults=AutoValues(max_grad_norm=0.0), gradient_clipping="auto")
    assert found.zero.gradient_clipping is None


@pytest.mark.parametrize(
    ("given", "expected"), [("fp32", "fp32"), ("BF16", "bf16"), ("fp16", "fp16"), (None, None)]
)
def test_communication_data_type(given: str | None, expected: Precision | None) -> None:
    assert settings(communication_data_type=given).zero.communication_dtype == expected


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stage_and_buckets(stage: int) -> None:
    section = {
        "stage": stage,
        "reduce_bucket_size": 0,
        "allgather_bucket_size": 2e8,
        "stage3_prefetch_bucket_size": 5e7,
    }
    assert settings(zero_optimization=section).zero == ZeroConfig(
        stage=stage,
        reduce_bucket_size=0,
        allgather_bucket_size=200_000_000,
        prefetch_bucket_size=50_000_000,
    )


def test_no_stage_is_stage_0_and_says_so_where_sharding_was_asked_for() -> None:
    assert settings().zero == ZeroConfig(stage=0)
    assert settings().warnings == ()
    assert pointers(settings(zero_optimization={}).warnings) == ["/zero_optimization/stage"]


def test_zero_plus_plus() -> None:
    section = {
        "stage": 3,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        "zero_hpz_partition_size": 4,
    }
    found = settings(8, zero_optimization=section)
    assert found.warnings == ()
    assert found.zero == ZeroConfig(
        stage=3, quantized_weights=True, quantized_gradients="int4", secondary_shard_size=4
    )
    below = settings(8, zero_optimization=section | {"stage": 2})
    assert below.zero == ZeroConfig(stage=2)
    assert pointers(below.warnings) == [f"/zero_optimization/{key}" for key in list(section)[1:]]


def test_hpz_of_one_rank_is_off() -> None:
    section = {"stage": 3, "zero_hpz_partition_size": 1, "zero_quantized_gradients": False}
    assert settings(zero_optimization=section).zero == ZeroConfig(stage=3)


def test_hpz_groups_must_fill_the_world() -> None:
    found = problems(8, zero_optimization={"stage": 3, "zero_hpz_partition_size": 3})
    assert "3 doesn't divide the 8 ranks" in found["/zero_optimization/zero_hpz_partition_size"]


@pytest.mark.parametrize(
    ("section", "expected", "warned"),
    [
        ({}, False, []),
        ({"partition_activations": False, "number_checkpoints": None}, False, []),
        ({"partition_activations": True}, True, ["partition_activations"]),
        (
            {"cpu_checkpointing": True, "number_checkpoints": 4},
            True,
            ["cpu_checkpointing", "number_checkpoints"],
        ),
        ({"number_checkpoints": 4}, True, ["number_checkpoints"]),
        ({"contiguous_memory_optimization": True}, True, ["contiguous_memory_optimization"]),
        ({"profile": True, "synchronize_checkpoint_boundary": False}, False, ["profile"]),
    ],
)
def test_activation_checkpointing(section: dict[str, Any], expected: bool, warned: list[str]) -> None:
    found = settings(activation_checkpointing=section)
    assert found.gradient_checkpointing is expected
    assert pointers(found.warnings) == [f"/activation_checkpointing/{key}" for key in warned]


ADAM = {"lr": 1e-4, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.1}


ADAMW = AdamWConfig(lr=1e-4, betas=(0.8, 0.99), eps=1e-7, weight_decay=0.1)


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("AdamW", ADAM, ADAMW),
        ("adamw", ADAM | {"adam_w_mode": False}, ADAMW),
        ("Adam", ADAM, ADAMW),
        ("Adam", ADAM | {"adam_w_mode": True, "torch_adam": True, "bias_correction": True}, ADAMW),
        (
            "Adam",
            ADAM | {"adam_w_mode": False},
            OptimizerConfig("Adam", 1e-4, 0.1, {"betas": (0.8, 0.99), "eps": 1e-7}),
        ),
        ("AdamW", {"lr": 1e-4, "amsgrad": False}, AdamWConfig(lr=1e-4)),
        ("AdamW", {"lr": 1e-4, "amsgrad": True}, OptimizerConfig("AdamW", 1e-4, 0, {"amsgrad": True})),
        ("AdamW", {}, AdamWConfig(lr=1e-3)),
        ("AdamW", {"torch_adam": True}, AdamWConfig(lr=1e-3, weight_decay=0.01)),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, OptimizerConfig("SGD", 0.1, 0, {"momentum": 0.9})),
        ("Rprop", {"etas": [0.4, 1.1]}, OptimizerConfig("Rprop", 0.01, 0, {"etas": (0.4, 1.1)})),
    ],
)
def test_optimizer(name: str, params: dict[str, Any], expected: AdamWConfig | OptimizerConfig) -> None:
    assert settings(optimizer={"type": name, "params": params}).optimizer == expected


def test_no_optimizer_and_no_scheduler_leave_both_to_the_caller() -> None:
    assert (settings().optimizer, settings().scheduler) == (None, None)
    found = settings(optimizer=None, scheduler=None)
    assert (found.optimizer, found.scheduler) == (None, None)


def scheduled(name: str, **params: Any) -> SchedulerSettings:
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    found = settings(optimizer=optimizer, scheduler={"type": name, "params": params}).scheduler
    assert found is not None
    return found


# Of 20 steps 8 are warm-up, and all begins one step late. ln 2^k / ln 8 = k / 3, and the cosines of 15, 90,
# 120 and 180 degrees are known.
COS_15 = (math.sqrt(6) + math.sqrt(2)) / 4


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("WarmupLR", {}, {0: 0, 1: 0, 2: 1 / 3, 4: 2 / 3, 8: 1, 9: 1, 500: 1}),
        ("WarmupLR", {"warmup_type": "linear"}, {0: 0, 1: 0, 2: 1 / 8, 7: 6 / 8, 8: 7 / 8, 9: 1, 500: 1}),
        ("WarmupLR", {"warmup_min_lr": 2.5e-4}, {0: 1 / 4, 1: 1 / 4, 2: 1 / 2, 4: 3 / 4, 8: 1, 500: 1}),
        (
            "WarmupDecayLR",
            {"total_num_steps": 20},
            {0: 0, 1: 0, 2: 1 / 3, 8: 1, 9: 1, 10: 11 / 12, 15: 1 / 2, 20: 1 / 12, 21: 0, 90: 0},
        ),
        (
            "WarmupDecayLR",
            {"total_num_steps": 20, "warmup_min_lr": 5e-4, "warmup_type": "linear"},
            {0: 1 / 2, 1: 1 / 2, 5: 3 / 4, 9: 1, 15: 3 / 4, 21: 1 / 2, 90: 1 / 2},
        ),
        (
            "WarmupCosineLR",
            {"total_num_steps": 20, "cos_min_ratio": 0},
            {0: 0, 1: 0, 4: 2 / 3, 8: 1, 9: (1 + COS_15) / 2, 14: 1 / 2, 16: 1 / 4, 20: 0, 90: 0},
        ),
        (
            "WarmupCosineLR",
            {"total_num_steps": 20, "cos_min_ratio": 0.2, "warmup_min_ratio": 0.4},
            {0: 0, 1: 0.4, 2: 0.6, 4: 0.8, 8: 1, 14: 0.6, 16: 0.4, 20: 0.2, 90: 0.2},
        ),
    ],
)
def test_schedules_at_steps_worked_out_by_hand(
    name: str, params: dict[str, Any], expected: dict[int, float]
) -> None:
    scheduler = scheduled(name, warmup_num_steps=8, **params)
    found = {step: scheduler.factor(step) for step in expected}
    assert found == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("warmup", [1, 2, 7])
@pytest.mark.parametrize("total", [1, 7, 40])
def test_the_cosine_is_a_squared_one_from_the_end_of_the_warm_up_to_its_floor(
    warmup: int, total: int
) -> None:
    scheduler = scheduled("WarmupCosineLR", warmup_num_steps=warmup, total_num_steps=total, cos_min_ratio=0.1)
    warmed = max(warmup, 2)
    for step in range(warmed + 1, 60):
        share = 1.0 if step - warmed >= total - warmed else (step - warmed) / (total - warmed)
        expected = 1 - 0.9 * math.sin(math.pi / 2 * share) ** 2
        assert scheduler.factor(step) == pytest.approx(expected, abs=1e-12)


def test_one_step_of_warm_up_is_two_as_in_deepspeed() -> None:
    assert [scheduled("WarmupLR", warmup_num_steps=1).factor(step) for step in range(4)] == [0, 0, 1, 1]


def test_the_peak_is_the_schedulers_as_in_deepspeed() -> None:
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    scheduler = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.4, "warmup_min_lr": 0.1}}
    found = settings(optimizer=optimizer, scheduler=scheduler)
    assert found.optimizer == OptimizerConfig("SGD", 0.4)
    assert found.scheduler is not None
    assert found.scheduler.factor(0) == 0.25
    assert pointers(found.warnings) == ["/scheduler/params/warmup_max_lr"]


def test_warmup_decay_rises_to_deepspeeds_default_when_no_peak_is_given() -> None:
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    found = settings(
        optimizer=optimizer, scheduler={"type": "WarmupDecayLR", "params": {"total_num_steps": 2000}}
    )
    assert found.optimizer == OptimizerConfig("SGD", 0.001)


def test_warmup_rises_to_the_learning_rate_that_there_is() -> None:
    scheduler = {"type": "WarmupLR", "params": {}}
    assert scheduled("WarmupLR").params["warmup_max_lr"] == 1e-3
    found = settings(defaults=AutoValues(learning_rate=2e-5), scheduler=scheduler).scheduler
    assert found is not None
    assert found.params["warmup_max_lr"] == 2e-5
    assert "no optimizer" in problems(scheduler=scheduler)["/scheduler/params/warmup_max_lr"]


def test_a_total_below_the_warm_up_is_said() -> None:
    scheduler = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 9, "total_num_steps": 8}}
    assert pointers(settings(scheduler=scheduler).warnings) == ["/scheduler/params/total_num_steps"]


def test_all_problems_are_reported_at_once() -> None:
    found = problems(
        4,
        train_batch_size=10,
        train_micro_batch_size_per_gpu=4,
        gradient_clipping=-1,
        bf16={"enabled": True},
        fp16={"enabled": True, "hysteresis": 0},
        zero_optimization={"stage": 4, "offload_param": {"device": "cpu"}, "reduce_bucket_sise": 1},
        optimizer={"type": "Lamb", "params": {"lr": 1}},
        scheduler={"type": "WarmupDecayLR", "params": {"warmup_type": "cubic"}},
        amp={"enabled": True},
        aio={"block_size": -1},
        unknown=1,
    )
    assert set(found) == {
        "/train_batch_size",
        "/gradient_clipping",
        "/fp16/enabled",
        "/fp16/hysteresis",
        "/zero_optimization/stage",
        "/zero_optimization/reduce_bucket_sise",
        "/optimizer/type",
        "/scheduler/params/warmup_type",
        "/scheduler/params/total_num_steps",
        "/amp",
        "/aio/block_size",
        "/unknown",
    }


def test_the_document_is_left_as_it_was() -> None:
    document = json.loads(ZERO_3.replace("DEVICE", "none"))
    from_deepspeed(document, world_size=2, defaults=ARGUMENTS)
    assert document == json.loads(ZERO_3.replace("DEVICE", "none"))


def test_it_loads_no_torch() -> None:
    program = "import sys, zero_core.config.deepspeed_json; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
