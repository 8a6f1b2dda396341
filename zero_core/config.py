"""Everything the engine and the training loop can be told, as frozen dataclasses without torch.

``ZeroConfig`` and ``AdamWConfig`` are the engine's; ``TrainConfig`` is the loop's and builds both.
A check that spans fields lives in ``__post_init__`` and names the field.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Precision = Literal["fp32", "bf16", "fp16"]
Strategy = Literal["full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"]
Quantization = Literal["int8", "int4"]
Scheduler = Literal["linear", "cosine", "constant", "constant_with_warmup"]
Method = Literal["supervised"]

STAGES = (0, 1, 2, 3)

STAGE_OF: dict[Strategy, int] = {
    "full_shard": 3,
    "shard_grad_op": 2,
    "no_shard": 0,
    "hybrid_shard": 3,
    "hybrid_shard_zero2": 2,
}

ELEMENTWISE_OPTIMIZERS = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
"""Classes of ``torch.optim`` whose update of an element reads no other element, so that shards can't tell."""


def _require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise ValueError(f"{field}: {message}")


def _one_of(field: str, value: object, allowed: tuple[object, ...]) -> None:
    _require(value in allowed, field, f"{value!r} is not one of {', '.join(map(repr, allowed))}")


def _finite(field: str, value: float, *, above: float | None = None, at_least: float | None = None) -> None:
    _require(math.isfinite(value), field, f"{value!r} is not a finite number")
    _require(above is None or value > above, field, f"{value!r} must be greater than {above}")
    _require(at_least is None or value >= at_least, field, f"{value!r} must be at least {at_least}")


@dataclass(frozen=True)
class AdamWConfig:
    """Decoupled weight decay Adam (Loshchilov & Hutter 2019), ``torch.optim.AdamW`` with its fused kernel."""

    lr: float = 1e-5
    """Peak learning rate; the scheduler multiplies it by a factor in [0, 1]."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the first and second moment."""

    eps: float = 1e-8
    """Added to the root of the second moment."""

    weight_decay: float = 0.0
    """Applied to matrices only: norms and biases (fewer than two dimensions) are never decayed."""

    def __post_init__(self) -> None:
        _finite("lr", self.lr, at_least=0)
        for beta in self.betas:
            _require(0 <= beta < 1, "betas", f"{beta!r} is not in [0, 1)")
        _finite("eps", self.eps, above=0)
        _finite("weight_decay", self.weight_decay, at_least=0)

    def named(self) -> "OptimizerConfig":
        return OptimizerConfig("AdamW", self.lr, self.weight_decay, {"betas": self.betas, "eps": self.eps})


@dataclass(frozen=True)
class OptimizerConfig:
    """An optimizer of ``torch.optim`` by its class name; it must be one that treats each element alone."""

    name: str
    """Class name in ``torch.optim``: one of ``ELEMENTWISE_OPTIMIZERS``."""

    lr: float
    """Peak learning rate."""

    weight_decay: float = 0.0
    """Applied to matrices only: norms and biases (fewer than two dimensions) are never decayed."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the class, ``momentum`` for example."""

    def __post_init__(self) -> None:
        _one_of("optimizer name", self.name, ELEMENTWISE_OPTIMIZERS)
        _finite("lr", self.lr, at_least=0)
        _finite("weight_decay", self.weight_decay, at_least=0)


@dataclass(frozen=True)
class LossScaleConfig:
    """Loss scaling of fp16 training, by DeepSpeed's rules and defaults."""

    static: float = 0.0
    """A fixed scale; 0 adapts it."""

    initial_scale_power: int = 16
    """The adapting scale starts at 2 to this power."""

    window: int = 1000
    """Steps without an overflow after which the scale doubles."""

    hysteresis: int = 2
    """Overflows to be seen before the scale is halved."""

    minimum: float = 1.0
    """The scale never falls below; an overflow there still skips its step."""

    def __post_init__(self) -> None:
        _finite("static", self.static, at_least=0)
        _require(0 <= self.initial_scale_power <= 32, "initial_scale_power", "is not in [0, 32]")
        _require(self.window >= 1, "window", "must be at least 1")
        _require(self.hysteresis >= 1, "hysteresis", "must be at least 1")
        _finite("minimum", self.minimum, above=0)


@dataclass(frozen=True)
class ZeroConfig:
    """How one model is placed on its ranks.

    Only ``precision``, ``communication_dtype`` and the two quantizations touch the trajectory.
    """

    stage: int = 3
    """0 replicates everything; 1 shards optimizer state; 2 also gradients; 3 also parameters."""

    strategy: Strategy | None = None
    """FSDP's word for a stage; when given it decides. The hybrid ones shard inside a node."""

    precision: Precision = "fp32"
    """Dtype of compute and of the parameters' working copy; the lower ones keep fp32 master weights."""

    gradient_accumulation_steps: int = 1
    """Calls of ``backward`` that make one optimizer step."""

    accumulate_locally: bool = False
    """At stages 2 and 3 keep the full gradient until the accumulation boundary and reduce once a step:
    fewer elements, at the price of stage 1's gradient memory."""

    gradient_clipping: float | None = None
    """Largest global L2 norm of the gradient; ``None`` never clips."""

    communication_dtype: Precision | None = None
    """Dtype that gradients travel in; ``None`` takes the precision's own."""

    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    """For fp16 alone."""

    reduce_bucket_size: int = 4_000_000
    """Elements: units that are ready one after the other are reduced together up to this size."""

    allgather_bucket_size: int = 4_000_000
    """Elements: units that are needed one after the other are gathered together up to this size."""

    prefetch_bucket_size: int = 4_000_000
    """Elements gathered ahead of use at stage 3, the next unit at least; 0 gathers nothing ahead."""

    shard_size: int | None = None
    """Ranks that share one copy of the model state; each group of them is a replica. ``None``: all ranks."""

    node_size: int | None = None
    """Ranks of a node; when given, collectives go inside the nodes and between them, in two steps."""

    secondary_shard_size: int | None = None
    """hpZ: ranks, those of a node, that keep a second copy of the parameters for backward's gathers."""

    quantized_weights: bool = False
    """qwZ: parameters are gathered as blocks of int8."""

    quantized_gradients: Quantization | None = None
    """qgZ: gradients are reduced as blocks of int8 or int4, the error fed back into the next step."""

    unit_classes: tuple[str, ...] = ()
    """Class names of modules that become units; empty takes the model's own blocks."""

    timeout_seconds: float = 600.0
    """Longest that a collective may take before the rank raises."""

    def __post_init__(self) -> None:
        if self.strategy is not None:
            _one_of("strategy", self.strategy, get_args(Strategy))
            object.__setattr__(self, "stage", STAGE_OF[self.strategy])
        _one_of("stage", self.stage, STAGES)
        _one_of("precision", self.precision, get_args(Precision))
        _require(self.gradient_accumulation_steps >= 1, "gradient_accumulation_steps", "must be at least 1")
        if self.gradient_clipping is not None:
            _finite("gradient_clipping", self.gradient_clipping, above=0)
        if self.communication_dtype is not None:
            _one_of("communication_dtype", self.communication_dtype, get_args(Precision))
        for name in ("reduce_bucket_size", "allgather_bucket_size", "prefetch_bucket_size"):
            _require(getattr(self, name) >= 0, name, "must be at least 0")
        for name in ("shard_size", "node_size", "secondary_shard_size"):
            size = getattr(self, name)
            _require(size is None or size >= 1, name, f"{size!r} must be at least 1")
        if self.quantized_gradients is not None:
            _one_of("quantized_gradients", self.quantized_gradients, get_args(Quantization))
        _require(
            self.stage == 3 or not self.quantized_weights,
            "quantized_weights",
            "parameters are gathered at stage 3 alone",
        )
        quantized = self.quantized_weights or self.quantized_gradients is not None
        one_step = "leave it out: quantized collectives go in one step"
        _require(self.node_size is None or not quantized, "node_size", one_step)
        _finite("timeout_seconds", self.timeout_seconds, above=0)


@dataclass(frozen=True)
class TrainConfig:
    """What a run does and how. Names are those of Hugging Face's ``TrainingArguments`` where it has one."""

    method: Method = "supervised"
    """Supervised fine-tuning: loss on assistant tokens, completions, or raw text."""

    num_train_epochs: float = 3.0
    """Passes over the training file; a fraction ends inside a pass. Ignored when ``max_steps`` is set."""

    max_steps: int | None = None
    """Optimizer steps to run; ``None`` derives them from ``num_train_epochs``."""

    train_batch_size: int = 8
    """Examples in one optimizer step, over all ranks and micro-batches: part of the result."""

    per_device_train_batch_size: int = 1
    """Examples a rank holds at once (the micro-batch): speed and memory only, never the result."""

    per_device_eval_batch_size: int = 1
    """Examples a rank holds at once during evaluation."""

    max_length: int = 1024
    """Tokens kept of one example; a longer one is cut at the end and counted in a warning."""

    learning_rate: float = 1e-5
    """Peak learning rate of AdamW."""

    lr_scheduler_type: Scheduler = "linear"
    """Shape of the learning rate after warm-up."""

    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0."""

    weight_decay: float = 0.0
    """Decoupled weight decay on matrices."""

    adam_beta1: float = 0.9
    """Decay rate of AdamW's first moment."""

    adam_beta2: float = 0.999
    """Decay rate of AdamW's second moment."""

    adam_epsilon: float = 1e-8
    """Added to the root of AdamW's second moment."""

    max_grad_norm: float | None = 1.0
    """Largest global L2 norm of the gradient; ``None`` never clips."""

    seed: int = 42
    """Seeds the order of examples and every random draw."""

    eval_steps: int | None = None
    """Evaluate every so many steps; ``None`` evaluates at the end of each epoch."""

    eval_on_start: bool = True
    """Also evaluate before the first step, so that a result has its baseline."""

    save_steps: int | None = None
    """Checkpoint every so many steps; ``None`` checkpoints at each epoch's end. The end always has one."""

    save_total_limit: int = 2
    """Newest checkpoints kept; older ones are deleted after a newer one verified."""

    gradient_checkpointing: bool = False
    """Recompute each block's activations in backward: less memory, about a third more compute."""

    zero_stage: int = 3
    """The engine's ``stage``."""

    precision: Precision = "fp32"
    """The engine's ``precision``."""

    communication_dtype: Precision | None = None
    """The engine's ``communication_dtype``."""

    def __post_init__(self) -> None:
        _one_of("method", self.method, get_args(Method))
        _finite("num_train_epochs", self.num_train_epochs, above=0)
        for name in ("max_steps", "eval_steps", "save_steps"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, f"{value!r} must be at least 1")
        for name in (
            "train_batch_size",
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "save_total_limit",
        ):
            _require(getattr(self, name) >= 1, name, f"{getattr(self, name)!r} must be at least 1")
        _require(self.max_length >= 2, "max_length", f"{self.max_length!r} must be at least 2")
        _one_of("lr_scheduler_type", self.lr_scheduler_type, get_args(Scheduler))
        _require(self.warmup_steps >= 0, "warmup_steps", f"{self.warmup_steps!r} must be at least 0")
        _require(0 <= self.seed < 2**31, "seed", f"{self.seed!r} is not in [0, 2147483647]")
        _finite("learning_rate", self.learning_rate, at_least=0)
        _finite("weight_decay", self.weight_decay, at_least=0)
        for name in ("adam_beta1", "adam_beta2"):
            _require(0 <= getattr(self, name) < 1, name, f"{getattr(self, name)!r} is not in [0, 1)")
        _finite("adam_epsilon", self.adam_epsilon, above=0)
        if self.max_grad_norm is not None:
            _finite("max_grad_norm", self.max_grad_norm, above=0)
        _one_of("zero_stage", self.zero_stage, STAGES)
        for name in ("precision", "communication_dtype"):
            if name == "precision" or getattr(self, name) is not None:
                _one_of(name, getattr(self, name), get_args(Precision))

    def accumulation_steps(self, world_size: int) -> int:
        """Micro-batches each rank runs for one optimizer step; the last may be partly or wholly empty."""
        return math.ceil(self.train_batch_size / (world_size * self.per_device_train_batch_size))

    def zero_config(self, world_size: int) -> ZeroConfig:
        return ZeroConfig(
            stage=self.zero_stage,
            precision=self.precision,
            gradient_accumulation_steps=self.accumulation_steps(world_size),
            gradient_clipping=self.max_grad_norm,
            communication_dtype=self.communication_dtype,
        )

    def optimizer_config(self) -> AdamWConfig:
        return AdamWConfig(
            lr=self.learning_rate,
            betas=(self.adam_beta1, self.adam_beta2),
            eps=self.adam_epsilon,
            weight_decay=self.weight_decay,
        )

    def total_steps(self, examples: int) -> int:
        """Optimizer steps of the whole run on a training file of ``examples`` usable examples."""
        if self.max_steps is not None:
            return self.max_steps
        return max(1, math.ceil(examples * self.num_train_epochs / self.train_batch_size))
