"""What is predicted and measured: models of 20 to 120 M parameters in all the ways that an engine trains."""

from dataclasses import dataclass
from typing import Literal

from zero_core.config.lora import LoraConfig
from zero_core.config.train import TrainConfig
from zero_core.config.zero import FrozenQuantization, Precision, ZeroConfig

Architecture = Literal["decoder", "wide decoder", "encoder-decoder", "two-tower"]


@dataclass(frozen=True)
class Case:
    architecture: Architecture
    stage: int
    ranks: int
    rows: int = 4
    """Sequences of a micro-batch."""

    length: int = 256
    """Tokens of each; of a two-tower model's texts 32, beside a picture."""

    packed: bool = False
    checkpointed: bool = False
    lora: bool = False
    quantization: FrozenQuantization | None = None
    micro_batches: int = 1
    precision: Precision = "fp32"

    @property
    def title(self) -> str:
        said = [self.architecture, f"stage {self.stage}", f"{self.ranks} rank{'s' * (self.ranks > 1)}"]
        said += [f"{self.rows} x {self.length}"]
        said += [name for name in ("packed", "checkpointed") if getattr(self, name)]
        said += ["LoRA"] * self.lora
        said += [] if self.quantization is None else [self.quantization]
        said += [f"{self.micro_batches} micro-batches"] * (self.micro_batches > 1)
        said += [self.precision] * (self.precision != "fp32")
        return ", ".join(said)

    @property
    def train(self) -> TrainConfig:
        """As far as a profile depends on it."""
        lora = LoraConfig(quantization=self.quantization) if self.lora else None
        return TrainConfig(max_length=1024, lora=lora, zero_stage=self.stage, precision=self.precision)

    @property
    def longest_recorded(self) -> int:
        """Tokens of the longest sequence that the profile is recorded with."""
        return self.length if self.architecture == "two-tower" else 1024

    @property
    def zero(self) -> ZeroConfig:
        return ZeroConfig(
            stage=self.stage,
            precision=self.precision,
            gradient_accumulation_steps=self.micro_batches,
            gradient_clipping=1.0,
            frozen_quantization=self.quantization,
        )


CASES = (
    *(Case("decoder", stage, 1) for stage in (0, 3)),
    *(Case("decoder", stage, 2) for stage in (0, 1, 2, 3)),
    Case("decoder", 3, 2, rows=2, length=1024),
    Case("decoder", 2, 2, packed=True),
    Case("decoder", 3, 2, packed=True, rows=8),
    Case("decoder", 0, 1, rows=8, checkpointed=True),
    Case("decoder", 3, 2, rows=8, checkpointed=True),
    Case("decoder", 1, 2, packed=True, rows=8, checkpointed=True),
    Case("decoder", 0, 2, micro_batches=2),
    Case("decoder", 2, 2, micro_batches=2),
    Case("decoder", 3, 2, micro_batches=2),
    Case("decoder", 0, 1, lora=True),
    Case("decoder", 3, 2, lora=True),
    Case("decoder", 3, 2, lora=True, quantization="nf4"),
    *(Case("wide decoder", stage, 2, rows=2) for stage in (0, 1, 2, 3)),
    Case("wide decoder", 3, 2, rows=2, checkpointed=True, lora=True, quantization="int8"),
    *(Case("encoder-decoder", stage, 2) for stage in (0, 1, 3)),
    Case("encoder-decoder", 2, 2, checkpointed=True),
    Case("encoder-decoder", 0, 1),
    *(Case("two-tower", stage, 2, rows=8, length=32) for stage in (0, 2, 3)),
    Case("two-tower", 1, 1, rows=8, length=32),
)
