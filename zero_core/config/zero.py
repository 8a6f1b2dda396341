"""How one model is placed on its ranks."""

from dataclasses import dataclass, field
from typing import Literal, get_args

from zero_core.config.checks import finite, one_of, require
from zero_core.config.offload import OffloadConfig

Precision = Literal["fp32", "bf16", "fp16"]
Strategy = Literal["full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2"]
Quantization = Literal["int8", "int4"]
FrozenQuantization = Literal["nf4", "int8"]

STAGES = (0, 1, 2, 3)

STAGE_OF: dict[Strategy, int] = {
    "full_shard": 3,
    "shard_grad_op": 2,
    "no_shard": 0,
    "hybrid_shard": 3,
    "hybrid_shard_zero2": 2,
}


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
        finite("static", self.static, at_least=0)
        require(0 <= self.initial_scale_power <= 32, "initial_scale_power", "is not in [0, 32]")
        require(self.window >= 1, "window", "must be at least 1")
        require(self.hysteresis >= 1, "hysteresis", "must be at least 1")
        finite("minimum", self.minimum, above=0)


@dataclass(frozen=True)
class ZeroConfig:
    """How one model is placed on its ranks.

    Only ``precision``, ``communication_dtype`` and the quantizations touch the trajectory.
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

    frozen_quantization: FrozenQuantization | None = None
    """How the frozen weights of linear layers inside the blocks are kept and gathered; each unit's are
    dequantized into a buffer for as long as it is used. ``None``: in their stored dtype."""

    offload: OffloadConfig = field(default_factory=OffloadConfig)
    """Tiers of the model's states and of activations."""

    scratch_directory: str | None = None
    """Where files of the disk tier go; ``None``: the system's temporary directory."""

    unit_classes: tuple[str, ...] = ()
    """Class names of modules that become units; empty takes the model's own blocks."""

    timeout_seconds: float = 600.0
    """Longest that a collective may take before the rank raises."""

    def __post_init__(self) -> None:
        if self.strategy is not None:
            one_of("strategy", self.strategy, get_args(Strategy))
            object.__setattr__(self, "stage", STAGE_OF[self.strategy])
        one_of("stage", self.stage, STAGES)
        one_of("precision", self.precision, get_args(Precision))
        require(self.gradient_accumulation_steps >= 1, "gradient_accumulation_steps", "must be at least 1")
        if self.gradient_clipping is not None:
            finite("gradient_clipping", self.gradient_clipping, above=0)
        if self.communication_dtype is not None:
            one_of("communication_dtype", self.communication_dtype, get_args(Precision))
        for name in ("reduce_bucket_size", "allgather_bucket_size", "prefetch_bucket_size"):
            require(getattr(self, name) >= 0, name, "must be at least 0")
        for name in ("shard_size", "node_size", "secondary_shard_size"):
            size = getattr(self, name)
            require(size is None or size >= 1, name, f"{size!r} must be at least 1")
        if self.quantized_gradients is not None:
            one_of("quantized_gradients", self.quantized_gradients, get_args(Quantization))
        if self.frozen_quantization is not None:
            one_of("frozen_quantization", self.frozen_quantization, get_args(FrozenQuantization))
        require(
            self.stage == 3 or not self.quantized_weights,
            "quantized_weights",
            "parameters are gathered at stage 3 alone",
        )
        quantized = self.quantized_weights or self.quantized_gradients is not None
        one_step = "leave it out: quantized collectives go in one step"
        require(self.node_size is None or not quantized, "node_size", one_step)
        require(
            self.stage == 3 or self.offload.parameters == "device",
            "offload.parameters",
            "parameters come and go at stage 3 alone",
        )
        require(
            self.secondary_shard_size in (None, 1) or self.offload.parameters == "device",
            "secondary_shard_size",
            "keeps parameters on the device, which offload.parameters takes off it: leave one of them out",
        )
        finite("timeout_seconds", self.timeout_seconds, above=0)
