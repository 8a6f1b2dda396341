"""A DeepSpeed JSON translated into this engine's configuration.

What a key means and its default are DeepSpeed's (``deepspeed/runtime/config.py``, ``zero/config.py`` and
``precision_config.py``, version 0.19); ``"auto"`` is filled as Hugging Face's ``HfTrainerDeepSpeedConfig``
fills it. Bucket sizes alone keep this engine's own defaults: they touch speed and memory, never the result.
A key has an effect here, or a warning says that it has none, or the document is refused.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from zero_core.config.deepspeed_keys import (
    AIO,
    DEFAULT_LR,
    LARGEST,
    OPTIMIZER_OPTIONS,
    REFUSED,
    REFUSED_OPTIMIZERS,
    REFUSED_SCHEDULERS,
    REPORTS,
    Auto,
    DeepSpeedConfigError,
    Findings,
    Problem,
    Section,
)
from zero_core.config.deepspeed_offload import offload
from zero_core.config.optimizer import ELEMENTWISE_OPTIMIZERS, AdamWConfig, OptimizerConfig
from zero_core.config.zero import LossScaleConfig, Precision, ZeroConfig

__all__ = [
    "AutoValues",
    "DeepSpeedConfigError",
    "DeepSpeedSettings",
    "Problem",
    "SchedulerSettings",
    "from_deepspeed",
]

SchedulerName = Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]

OWN_METRICS = "no effect: the run keeps its own metrics"


@dataclass(frozen=True)
class AutoValues:
    """The training arguments that stand in for ``"auto"``; ``None`` is one that was not given."""

    learning_rate: float | None = None
    weight_decay: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None

    max_grad_norm: float | None = None
    """0 never clips."""

    micro_batch_size: int | None = None
    """Examples a rank holds at once."""

    gradient_accumulation_steps: int | None = None

    warmup_steps: int | None = None
    """0 becomes 1 step, as in Hugging Face's: DeepSpeed refuses 0."""

    total_steps: int | None = None
    """Optimizer steps of the whole run."""

    precision: Precision | None = None

    hidden_size: int | None = None
    """The model's width h: buckets of h² elements, prefetch of 0.9 h², persistence below 10 h."""


@dataclass(frozen=True)
class SchedulerSettings:
    """A scheduler of DeepSpeed's (``deepspeed/runtime/lr_schedules.py``, version 0.19)."""

    name: SchedulerName

    params: Mapping[str, Any]
    """Under DeepSpeed's names, defaults filled in. ``warmup_max_lr``, where there is one, is the peak."""

    def factor(self, step: int) -> float:
        """Learning rate of the step that follows ``step`` finished ones, over the peak learning rate.

        DeepSpeed's schedule moves after each step and is built one before its beginning, so its value at i
        (``last_batch_iteration``) serves step i + 1, counted from 0. Step 0 takes the minimum, or 0 under
        WarmupCosineLR whatever its ``warmup_min_ratio``. With r the minimum over the peak, w the warm-up
        and T the total steps, the factor is r + (1 - r) g, where g is ln(i + 1) / ln(w) or i / w up to w,
        and after it 1 (WarmupLR) or (T - i) / (T - w) (WarmupDecayLR). WarmupCosineLR ends in
        m + (1 - m) (1 + cos(pi (i - w + 1) / (T - w))) / 2, where m is its ``cos_min_ratio``.
        """
        start = self._start()
        if step == 0:
            return 0.0 if self.name == "WarmupCosineLR" else start
        done, warmup = step - 1, max(2, self.params["warmup_num_steps"])
        if done < warmup:
            linear = self.params["warmup_type"] == "linear"
            return start + (1 - start) * (done / warmup if linear else math.log(done + 1) / math.log(warmup))
        if self.name == "WarmupLR":
            return 1.0
        total = self.params["total_num_steps"]
        if self.name == "WarmupDecayLR":
            return start + (1 - start) * max(0.0, (total - done) / max(1, total - warmup))
        floor = self.params["cos_min_ratio"]
        progress = min(1.0, (done - warmup + 1) / max(1, total - warmup))
        return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2

    def _start(self) -> float:
        if self.name == "WarmupCosineLR":
            return self.params["warmup_min_ratio"]
        return self.params["warmup_min_lr"] / self.params["warmup_max_lr"]


@dataclass(frozen=True)
class DeepSpeedSettings:
    zero: ZeroConfig

    optimizer: AdamWConfig | OptimizerConfig | None
    """``None`` leaves it to the caller. Its ``lr`` is the peak that the scheduler's factor multiplies."""

    scheduler: SchedulerSettings | None
    """``None`` leaves it to the caller."""

    train_batch_size: int
    """Examples in one optimizer step, over all ranks and micro-batches."""

    micro_batch_size: int
    """Examples a rank holds at once."""

    gradient_checkpointing: bool
    """Whether the ``activation_checkpointing`` section turns anything on."""

    warnings: tuple[str, ...]
    """Each begins with the JSON pointer of what it is about."""


def from_deepspeed(
    document: Mapping[str, Any], *, world_size: int, defaults: AutoValues | None = None
) -> DeepSpeedSettings:
    """Translate a parsed DeepSpeed JSON for a run of ``world_size`` ranks.

    Raises ``DeepSpeedConfigError`` with every problem of the document, not only the first.
    """
    if world_size < 1:
        raise ValueError(f"world_size: {world_size!r} must be at least 1")
    autos = defaults or AutoValues()
    findings = Findings()
    root = findings.root(document)
    batch = _batch(root, world_size, autos, findings)
    zero = _zero(root, world_size, batch, autos)
    optimizer = _optimizer(root, autos)
    scheduler = _scheduler(root, optimizer.lr if optimizer else autos.learning_rate, autos)
    checkpointing = _activation_checkpointing(root)
    _without_effect(root)
    for key, reason in REFUSED.items():
        root.refuse_unless_disabled(key, reason)
    findings.close()
    optimizer = _at_peak(root, optimizer, scheduler)
    return DeepSpeedSettings(
        zero=zero,
        optimizer=optimizer,
        scheduler=scheduler,
        train_batch_size=batch.train,
        micro_batch_size=batch.micro,
        gradient_checkpointing=checkpointing,
        warnings=tuple(findings.warnings),
    )


@dataclass(frozen=True)
class _Batch:
    train: int
    micro: int
    accumulation: int


def _batch(root: Section, world_size: int, autos: AutoValues, findings: Findings) -> _Batch:
    """Any two give the third; one of the batch sizes alone means that nothing is accumulated."""
    before = len(findings.problems)
    micro = root.integer(
        "train_micro_batch_size_per_gpu",
        None,
        at_least=1,
        auto=Auto("micro_batch_size", autos.micro_batch_size),
    )
    accumulation = root.integer(
        "gradient_accumulation_steps",
        None,
        at_least=1,
        auto=Auto("gradient_accumulation_steps", autos.gradient_accumulation_steps),
    )
    train = root.integer(
        "train_batch_size", None, at_least=1, auto=_auto_train(micro, accumulation, world_size, autos)
    )
    if train is None and micro is None and len(findings.problems) == before:
        root.refuse("train_batch_size", "is missing, and so is train_micro_batch_size_per_gpu: write one")
    if len(findings.problems) > before:
        return _Batch(1, 1, 1)
    if train is None:
        assert micro is not None
        accumulation = accumulation or 1
        train = micro * accumulation * world_size
    elif micro is None:
        accumulation = accumulation or 1
        micro = train // (accumulation * world_size)
    elif accumulation is None:
        accumulation = train // (micro * world_size)
    product = micro * accumulation * world_size
    if product == train:
        return _Batch(train, micro, accumulation)
    root.refuse(
        "train_batch_size",
        f"{train} is not micro-batch {micro} x accumulation {accumulation} x {world_size} ranks = {product}:"
        " change one of them",
    )
    return _Batch(1, 1, 1)


def _auto_train(micro: int | None, accumulation: int | None, world_size: int, autos: AutoValues) -> Auto:
    micro = micro or autos.micro_batch_size
    accumulation = accumulation or autos.gradient_accumulation_steps
    if micro is None or accumulation is None:
        missing = "micro_batch_size" if micro is None else "gradient_accumulation_steps"
        return Auto(missing, None)
    return Auto("train_batch_size", micro * accumulation * world_size)


def _zero(root: Section, world_size: int, batch: _Batch, autos: AutoValues) -> ZeroConfig:
    section = root.section("zero_optimization")
    stage = section.integer("stage", 0, at_most=3)
    if "zero_optimization" in root and "stage" not in section:
        section.warn("stage", "missing, which is stage 0, as in DeepSpeed: nothing is sharded")
    width = autos.hidden_size
    square = None if width is None else width * width
    prefetch: int | None = ZeroConfig.prefetch_bucket_size
    if stage == 3:
        prefetch = None if square is None else int(0.9 * square)
    _zero_without_counterpart(section, stage, width)
    quantized_weights, quantized_gradients, secondary = _zero_plus_plus(section, stage, world_size)
    tiers, scratch_directory = offload(section, stage)
    if secondary is not None and tiers.parameters != "device":
        section.refuse("zero_hpz_partition_size", "keeps on the device what offload_param takes off it")
        secondary = None
    clipping = root.number("gradient_clipping", 0.0, auto=Auto("max_grad_norm", autos.max_grad_norm))
    return ZeroConfig(
        stage=stage,
        precision=_precision(root, autos),
        gradient_accumulation_steps=batch.accumulation,
        gradient_clipping=clipping or None,
        communication_dtype=cast(
            Precision | None, root.choice("communication_data_type", None, ("fp32", "bf16", "fp16"))
        ),
        loss_scale=_loss_scale(root.section("fp16")),
        reduce_bucket_size=section.integer(
            "reduce_bucket_size", ZeroConfig.reduce_bucket_size, auto=Auto("hidden_size", square)
        ),
        allgather_bucket_size=section.integer("allgather_bucket_size", ZeroConfig.allgather_bucket_size),
        prefetch_bucket_size=section.integer(
            "stage3_prefetch_bucket_size",
            ZeroConfig.prefetch_bucket_size,
            auto=Auto("hidden_size", prefetch),
        ),
        secondary_shard_size=secondary,
        quantized_weights=quantized_weights,
        quantized_gradients="int4" if quantized_gradients else None,
        offload=tiers,
        scratch_directory=scratch_directory,
    )


def _zero_plus_plus(section: Section, stage: int, world_size: int) -> tuple[bool, bool, int | None]:
    """qwZ, qgZ and hpZ's group size, ``None`` where it is off (Wang et al. 2023, ZeRO++)."""
    weights = section.flag("zero_quantized_weights", False)
    gradients = section.flag("zero_quantized_gradients", False)
    ranks = section.integer("zero_hpz_partition_size", 1, at_least=1)
    if world_size % ranks:
        section.refuse("zero_hpz_partition_size", f"{ranks} doesn't divide the {world_size} ranks")
    if stage == 3:
        return weights, gradients, ranks if ranks > 1 else None
    for key, is_on in (
        ("zero_quantized_weights", weights),
        ("zero_quantized_gradients", gradients),
        ("zero_hpz_partition_size", ranks > 1),
    ):
        if is_on:
            section.warn(key, f"no effect at stage {stage}, as in DeepSpeed")
    return False, False, None


def _zero_without_counterpart(section: Section, stage: int, width: int | None) -> None:
    for key, otherwise in (
        ("overlap_comm", "reduction always overlaps backward"),
        ("contiguous_gradients", "a unit's gradients always lie in one buffer"),
        ("reduce_scatter", "gradients are always reduce-scattered to their shards"),
        ("allgather_partitions", "parameters are always all-gathered"),
        ("stage3_gather_16bit_weights_on_model_save", "a saved model always has whole weights"),
    ):
        if not section.flag(key, True):
            section.warn(key, f"no effect: {otherwise}")
    if section.flag("round_robin_gradients", False):
        section.warn("round_robin_gradients", "no effect: no gradient is copied to CPU memory")
    released = "no effect: a unit's parameters are released right after use"
    persistent = None if width is None else 10 * width
    for key, instead, auto in (
        ("stage3_max_live_parameters", released, None),
        ("stage3_max_reuse_distance", released, None),
        (
            "stage3_param_persistence_threshold",
            "no effect: small parameters are sharded with their unit",
            Auto("hidden_size", persistent if stage == 3 else 0),
        ),
        ("sub_group_size", "no effect: the optimizer updates one unit at a time", None),
    ):
        if section.integer(key, None, auto=auto) is not None and stage == 3:
            section.warn(key, instead)
    section.refuse_unless_disabled("zenflow", REFUSED["zenflow"])


def _precision(root: Section, autos: AutoValues) -> Precision:
    known = autos.precision is not None
    enabled = {
        name: root.section(name).flag(
            "enabled", False, auto=Auto("precision", autos.precision == name if known else None)
        )
        for name in ("bf16", "fp16")
    }
    if all(enabled.values()):
        root.section("fp16").refuse("enabled", "is true, and so is /bf16/enabled: turn one off")
    return "bf16" if enabled["bf16"] else "fp16" if enabled["fp16"] else "fp32"


def _loss_scale(fp16: Section) -> LossScaleConfig:
    if fp16.flag("auto_cast", False):
        fp16.warn("auto_cast", "no effect: the model's inputs are never cast")
    for key, otherwise in (
        ("consecutive_hysteresis", "the hysteresis is refilled only when the scale grows"),
        ("fp16_master_weights_and_grads", "master weights are fp32"),
    ):
        if fp16.flag(key, False):
            fp16.refuse(key, f"true is not supported: {otherwise}")
    return LossScaleConfig(
        static=fp16.number("loss_scale", LossScaleConfig.static),
        initial_scale_power=fp16.integer(
            "initial_scale_power", LossScaleConfig.initial_scale_power, at_most=32
        ),
        window=fp16.integer("loss_scale_window", LossScaleConfig.window, at_least=1),
        hysteresis=fp16.integer("hysteresis", LossScaleConfig.hysteresis, at_least=1),
        minimum=fp16.number("min_loss_scale", LossScaleConfig.minimum, above=0),
    )


def _optimizer(root: Section, autos: AutoValues) -> AdamWConfig | OptimizerConfig | None:
    if "optimizer" not in root:
        return None
    section = root.section("optimizer")
    params = section.section("params")
    section.require("type")
    name = section.choice("type", None, ELEMENTWISE_OPTIMIZERS, refused=REFUSED_OPTIMIZERS)
    if name is None:
        params.accept_all()
        return None
    weight_decay = 0.0
    if name in ("Adam", "AdamW"):
        # DeepSpeed's own kernel decays by 0 unless told, torch's AdamW by 0.01.
        torchs = params.flag("torch_adam", False)
        name = "AdamW" if params.flag("adam_w_mode", True) else name
        weight_decay = 0.01 if torchs and name == "AdamW" else 0.0
        if not params.flag("bias_correction", True):
            params.refuse("bias_correction", f"false is not supported: {name} always corrects")
    if "max_grad_norm" in params:
        params.refuse("max_grad_norm", "is not an optimizer's: write gradient_clipping")
    lr = params.number("lr", DEFAULT_LR[name], auto=Auto("learning_rate", autos.learning_rate))
    if name != "Rprop":
        weight_decay = params.number(
            "weight_decay", weight_decay, auto=Auto("weight_decay", autos.weight_decay)
        )
    given = params.read(
        OPTIMIZER_OPTIONS[name] | {"maximize": "flag"},
        {"betas": Auto("betas", autos.betas), "eps": Auto("eps", autos.eps)},
    )
    options = {key: value for key, value in given.items() if value is not False}
    if name == "AdamW" and options.keys() <= {"betas", "eps"}:
        return AdamWConfig(lr=lr, weight_decay=weight_decay, **options)
    return OptimizerConfig(name, lr, weight_decay, options)


def _scheduler(root: Section, lr: float | None, autos: AutoValues) -> SchedulerSettings | None:
    if "scheduler" not in root:
        return None
    section = root.section("scheduler")
    params = section.section("params")
    section.require("type")
    name = section.choice("type", None, get_args(SchedulerName), refused=REFUSED_SCHEDULERS)
    if name is None:
        params.accept_all()
        return None
    warmup = None if autos.warmup_steps is None else max(1, autos.warmup_steps)
    values: dict[str, Any] = {
        "warmup_num_steps": params.integer(
            "warmup_num_steps", 1000, at_least=1, auto=Auto("warmup_steps", warmup)
        ),
        "warmup_type": params.choice("warmup_type", "log", ("log", "linear")),
    }
    if name != "WarmupLR":
        params.require("total_num_steps")
        values["total_num_steps"] = params.integer(
            "total_num_steps", LARGEST, at_least=1, auto=Auto("total_steps", autos.total_steps)
        )
        if values["total_num_steps"] < values["warmup_num_steps"]:
            params.warn("total_num_steps", "is less than warmup_num_steps: the warm-up is cut short")
    if name == "WarmupCosineLR":
        values["warmup_min_ratio"] = params.number("warmup_min_ratio", 0.0, at_most=1)
        values["cos_min_ratio"] = params.number("cos_min_ratio", 0.0001, at_most=1)
    else:
        values |= _absolute(params, lr if name == "WarmupLR" else 0.001, autos)
    return SchedulerSettings(cast(SchedulerName, name), values)


def _absolute(params: Section, peak: float | None, autos: AutoValues) -> dict[str, float]:
    """The learning rates that the warm-up begins and ends with; ``peak`` is where it ends unless told."""
    highest = params.number("warmup_max_lr", peak, above=0, auto=Auto("learning_rate", autos.learning_rate))
    lowest = params.number("warmup_min_lr", 0.0, auto=Auto("warmup_min_lr", 0.0))
    if highest is None and "warmup_max_lr" not in params:
        params.refuse("warmup_max_lr", "is missing, and no optimizer has a learning rate to rise to")
    elif highest is not None and lowest > highest:
        params.refuse("warmup_min_lr", f"{lowest} is more than warmup_max_lr, which is {highest}")
    return {"warmup_min_lr": lowest, "warmup_max_lr": highest or 1.0}


def _at_peak(
    root: Section, optimizer: AdamWConfig | OptimizerConfig | None, scheduler: SchedulerSettings | None
) -> AdamWConfig | OptimizerConfig | None:
    """The optimizer with the learning rate that the scheduler rises to, which wins in DeepSpeed."""
    peak = None if scheduler is None else scheduler.params.get("warmup_max_lr")
    if optimizer is None or peak is None or peak == optimizer.lr:
        return optimizer
    root.section("scheduler").section("params").warn(
        "warmup_max_lr",
        f"{peak} is the peak, as in DeepSpeed: the optimizer's lr {optimizer.lr} has no effect",
    )
    return replace(optimizer, lr=peak)


def _activation_checkpointing(root: Section) -> bool:
    section = root.section("activation_checkpointing")
    is_on = False
    for key, beyond in (
        ("partition_activations", "activations are recomputed, not partitioned"),
        ("contiguous_memory_optimization", "no buffer is set aside for activations"),
        ("cpu_checkpointing", "activations are recomputed, not copied to CPU memory"),
    ):
        if section.flag(key, False):
            section.warn(key, f"each block is recomputed in backward; {beyond}")
            is_on = True
    if section.integer("number_checkpoints", 0):
        section.warn("number_checkpoints", "no effect on where: every block is a checkpoint")
        is_on = True
    for key in ("synchronize_checkpoint_boundary", "profile"):
        if section.flag(key, False):
            section.warn(key, "no effect")
    return is_on


def _without_effect(root: Section) -> None:
    # Every optimizer that is accepted at all is safe here.
    root.flag("zero_allow_untested_optimizer", False)
    if root.integer("steps_per_print", None, at_least=1) is not None:
        root.warn("steps_per_print", OWN_METRICS)
    for key in ("wall_clock_breakdown", "dump_state"):
        if root.flag(key, False):
            root.warn(key, OWN_METRICS)
    for key, kinds in REPORTS.items():
        if root.section(key).read(kinds).get("enabled", False):
            root.warn(key, OWN_METRICS)
    if root.section("aio").read(AIO):
        root.warn("aio", "no effect: the disk tier chooses the sizes of its reads and writes itself")
