"""What a run does: the training loop's own settings, which also build the engine's."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from zero_core.config.checks import count, finite, one_of, require, short
from zero_core.config.dpo import DpoConfig
from zero_core.config.lora import LoraConfig
from zero_core.config.offload import OffloadConfig
from zero_core.config.optimizer import ELEMENTWISE_OPTIMIZERS, OptimizerConfig
from zero_core.config.zero import STAGES, Precision, ZeroConfig

Scheduler = Literal["linear", "cosine", "constant", "constant_with_warmup"]
Method = Literal["supervised", "dpo"]
Overflow = Literal["truncate", "split", "drop"]
TrainOn = Literal["all", "last"]

OPTIMIZERS_BY_NAME = {name.lower(): name for name in ELEMENTWISE_OPTIMIZERS} | {
    "adamw_torch": "AdamW",
    "adamw_torch_fused": "AdamW",
}
"""Also by the names of Hugging Face's ``optim``."""

MOST_EPOCHS = 1_000_000

DEFAULT_LEARNING_RATES: dict[Method, tuple[float, float]] = {
    "supervised": (1e-5, 1e-4),
    "dpo": (1e-6, 1e-5),
}
"""Peaks where every weight is trained, and where adapters are: those start from nothing and train best at
about ten times the rate."""


def default_learning_rate(method: Method, *, adapters: bool) -> float:
    return DEFAULT_LEARNING_RATES[method][adapters]


@dataclass(frozen=True)
class TrainConfig:
    """What a run does and how. Names are those of Hugging Face's ``TrainingArguments`` where it has one."""

    method: Method = "supervised"
    """``supervised``: loss on assistant tokens, completions, or raw text. ``dpo``: direct preference
    optimization (Rafailov et al. 2023) on pairs of answers."""

    dpo: DpoConfig = field(default_factory=DpoConfig)
    """For the method ``dpo`` alone."""

    lora: LoraConfig | None = None
    """Train low-rank adapters beside the frozen model; ``None`` trains every weight."""

    num_train_epochs: float = 3.0
    """Passes over the training file; a fraction ends inside a pass. Ignored when ``max_steps`` is set."""

    max_steps: int | None = None
    """Optimizer steps to run; ``None`` derives them from ``num_train_epochs``."""

    train_batch_size: int = 8
    """Examples in one optimizer step, over all ranks and micro-batches: part of the result."""

    per_device_train_batch_size: int = 1
    """Examples a rank holds at once (the micro-batch): speed and memory only, never the result."""

    per_device_max_tokens: int | None = None
    """Tokens a rank holds at once: a micro-batch takes as many examples as fit, a longer one alone. When
    given it replaces ``per_device_train_batch_size`` and ``per_device_eval_batch_size``."""

    packing: bool = True
    """Lay the examples of a micro-batch end to end, each with positions and attention of its own, instead of
    padding them to one length: speed and memory only. Models that can't are padded, with a warning."""

    logits_bytes: int = 256 * 2**20
    """Logits (fp32) computed at once; the loss of more target tokens is computed in pieces, again in
    backward: speed and memory only."""

    per_device_eval_batch_size: int = 1
    """Examples a rank holds at once during evaluation."""

    max_length: int = 1024
    """Most tokens of one example; ``overflow`` says what becomes of a longer one."""

    overflow: Overflow = "truncate"
    """An example longer than ``max_length`` is cut at the end, split into several, or left out; each is
    counted in a warning. Conversations can't be split."""

    train_on: TrainOn = "all"
    """Which assistant turns of a conversation are learnt: each (but those of weight 0), or the last alone."""

    chat_template: str | None = None
    """A Jinja chat template to use instead of the model's; it is stored with the result."""

    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Variables for the chat template, ``enable_thinking`` for example."""

    validation_split: float | None = None
    """Share of the training file, chosen by ``seed``, that is held out for validation where there is no
    validation file."""

    optim: str = "AdamW"
    """Optimizer: a class of ``torch.optim`` that treats each element alone (``ELEMENTWISE_OPTIMIZERS``)."""

    optim_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of ``optim``, ``momentum`` for example."""

    learning_rate: float | None = None
    """Peak learning rate; ``None`` is the kind's own: 1e-5 for supervised training and 1e-6 for DPO, ten
    times as much with LoRA."""

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

    eval_samples: int = 0
    """Prompts of the validation set that the model answers at each evaluation, greedily."""

    eval_sample_tokens: int = 64
    """Most tokens of such an answer."""

    eval_on_start: bool = True
    """Also evaluate before the first step, so that a result has its baseline."""

    save_steps: int | None = None
    """Checkpoint every so many steps; ``None`` checkpoints at each epoch's end. The end always has one."""

    save_total_limit: int = 2
    """Newest checkpoints kept; older ones are deleted after a newer one verified."""

    gradient_checkpointing: bool = False
    """Recompute each block's activations in backward: less memory, about a third more compute."""

    zero_stage: int | Literal["auto"] = 3
    """The engine's ``stage``; ``auto`` takes the plan with the least communication that fits, which may also
    recompute activations and offload where nothing else does."""

    offload: OffloadConfig = field(default_factory=OffloadConfig)
    """Where the model's states and activations lie when they are not in use."""

    precision: Precision | Literal["auto"] = "auto"
    """The engine's ``precision``; ``auto`` is bf16 on a device that computes in it, else fp32. A run that
    goes on keeps what it began with."""

    communication_dtype: Precision | None = None
    """The engine's ``communication_dtype``."""

    def __post_init__(self) -> None:
        one_of("method", self.method, get_args(Method))
        finite("num_train_epochs", self.num_train_epochs, above=0, at_most=MOST_EPOCHS)
        for name in ("max_steps", "eval_steps", "save_steps", "per_device_max_tokens"):
            if getattr(self, name) is not None:
                count(name, getattr(self, name), at_least=1)
        for name in (
            "train_batch_size",
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "save_total_limit",
            "eval_sample_tokens",
        ):
            count(name, getattr(self, name), at_least=1)
        count("logits_bytes", self.logits_bytes, at_least=1, at_most=2**63 - 1)
        count("max_length", self.max_length, at_least=2)
        one_of("lr_scheduler_type", self.lr_scheduler_type, get_args(Scheduler))
        one_of("overflow", self.overflow, get_args(Overflow))
        one_of("train_on", self.train_on, get_args(TrainOn))
        if self.validation_split is not None:
            share = f"{self.validation_split!r} is not in (0, 0.5]"
            require(0 < self.validation_split <= 0.5, "validation_split", share)
        count("eval_samples", self.eval_samples, at_least=0)
        known = f"{short(self.optim)} is not one of {', '.join(ELEMENTWISE_OPTIMIZERS)}"
        require(self.optim.lower() in OPTIMIZERS_BY_NAME, "optim", known)
        object.__setattr__(self, "optim", OPTIMIZERS_BY_NAME[self.optim.lower()])
        count("warmup_steps", self.warmup_steps, at_least=0)
        require(0 <= self.seed < 2**31, "seed", f"{self.seed!r} is not in [0, 2147483647]")
        if self.learning_rate is not None:
            finite("learning_rate", self.learning_rate, at_least=0)
        finite("weight_decay", self.weight_decay, at_least=0)
        for name in ("adam_beta1", "adam_beta2"):
            require(0 <= getattr(self, name) < 1, name, f"{getattr(self, name)!r} is not in [0, 1)")
        finite("adam_epsilon", self.adam_epsilon, above=0)
        if self.max_grad_norm is not None:
            finite("max_grad_norm", self.max_grad_norm, above=0)
        one_of("zero_stage", self.zero_stage, ("auto", *STAGES))
        require(self.zero_stage != "auto", "zero_stage", "plans are not chosen yet: give a stage, 0 to 3")
        require(
            self.zero_stage in ("auto", 3) or self.offload.parameters == "device",
            "offload.parameters",
            "parameters come and go at zero_stage 3 alone",
        )
        one_of("precision", self.precision, ("auto", *get_args(Precision)))
        if self.communication_dtype is not None:
            one_of("communication_dtype", self.communication_dtype, get_args(Precision))

    @property
    def peak_learning_rate(self) -> float:
        if self.learning_rate is not None:
            return self.learning_rate
        return default_learning_rate(self.method, adapters=self.lora is not None)

    def accumulation_steps(self, world_size: int) -> int:
        """The most micro-batches that each rank runs for one optimizer step; some may be empty."""
        rows = 1 if self.per_device_max_tokens else self.per_device_train_batch_size
        return math.ceil(self.train_batch_size / (world_size * rows))

    def zero_config(
        self, world_size: int, precision: Precision, scratch_directory: str | None = None
    ) -> ZeroConfig:
        """``precision`` is what ``auto`` comes to on the device at hand, else the configured one."""
        assert self.zero_stage != "auto", "a plan was to be chosen before"
        return ZeroConfig(
            stage=self.zero_stage,
            precision=precision,
            gradient_accumulation_steps=self.accumulation_steps(world_size),
            gradient_clipping=self.max_grad_norm,
            communication_dtype=self.communication_dtype,
            frozen_quantization=self.lora.quantization if self.lora else None,
            offload=self.offload,
            scratch_directory=scratch_directory,
        )

    def optimizer_config(self) -> OptimizerConfig:
        options = dict(self.optim_args)
        if "Adam" in self.optim:
            options = {"betas": (self.adam_beta1, self.adam_beta2), "eps": self.adam_epsilon} | options
        return OptimizerConfig(self.optim, self.peak_learning_rate, self.weight_decay, options)

    def total_samples(self, examples: int) -> int:
        """Samples of ``num_train_epochs`` passes over a training file of ``examples`` usable examples."""
        return max(1, round(examples * self.num_train_epochs))

    def total_steps(self, examples: int) -> int:
        """Optimizer steps of the whole run on a training file of ``examples`` usable examples.

        Each epoch ends with a step of its own, which may be smaller than the others.
        """
        if self.max_steps is not None:
            return self.max_steps
        epochs, rest = divmod(self.total_samples(examples), examples)
        each = math.ceil(examples / self.train_batch_size)
        return epochs * each + math.ceil(rest / self.train_batch_size)
