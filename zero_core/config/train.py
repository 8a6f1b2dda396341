"""What a run does: the training loop's own settings, which also build the engine's."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from zero_core.config.checks import finite, one_of, require
from zero_core.config.optimizer import AdamWConfig
from zero_core.config.zero import STAGES, Precision, ZeroConfig

Scheduler = Literal["linear", "cosine", "constant", "constant_with_warmup"]
Method = Literal["supervised"]


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
        one_of("method", self.method, get_args(Method))
        finite("num_train_epochs", self.num_train_epochs, above=0)
        for name in ("max_steps", "eval_steps", "save_steps"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, f"{value!r} must be at least 1")
        for name in (
            "train_batch_size",
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "save_total_limit",
        ):
            require(getattr(self, name) >= 1, name, f"{getattr(self, name)!r} must be at least 1")
        require(self.max_length >= 2, "max_length", f"{self.max_length!r} must be at least 2")
        one_of("lr_scheduler_type", self.lr_scheduler_type, get_args(Scheduler))
        require(self.warmup_steps >= 0, "warmup_steps", f"{self.warmup_steps!r} must be at least 0")
        require(0 <= self.seed < 2**31, "seed", f"{self.seed!r} is not in [0, 2147483647]")
        finite("learning_rate", self.learning_rate, at_least=0)
        finite("weight_decay", self.weight_decay, at_least=0)
        for name in ("adam_beta1", "adam_beta2"):
            require(0 <= getattr(self, name) < 1, name, f"{getattr(self, name)!r} is not in [0, 1)")
        finite("adam_epsilon", self.adam_epsilon, above=0)
        if self.max_grad_norm is not None:
            finite("max_grad_norm", self.max_grad_norm, above=0)
        one_of("zero_stage", self.zero_stage, STAGES)
        for name in ("precision", "communication_dtype"):
            if name == "precision" or getattr(self, name) is not None:
                one_of(name, getattr(self, name), get_args(Precision))

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
