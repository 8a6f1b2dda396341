"""Low-rank adapters: what is trained beside a frozen model."""

from dataclasses import dataclass
from typing import Literal, get_args

from zero_core.config.checks import count, finite, one_of, require, short
from zero_core.config.zero import FrozenQuantization


@dataclass(frozen=True)
class LoraConfig:
    """LoRA (Hu et al. 2021) by peft's names. Dropout is off, as everywhere (decision 0003)."""

    r: int = 16
    """Rank of the update of each adapted matrix."""

    alpha: float = 32.0
    """The update is multiplied by alpha / r, or alpha / sqrt(r) with ``use_rslora``."""

    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    """Name endings of the linear layers that are adapted; ``all-linear``: every one but the output layer."""

    exclude_modules: tuple[str, ...] = ()
    """Name endings of layers that are left alone although they are targets."""

    modules_to_save: tuple[str, ...] = ()
    """Name endings of modules that are trained whole and stored with the adapter, ``lm_head`` for example."""

    use_rslora: bool = False
    """Rank-stabilised scaling (Kalajdzievski 2023)."""

    quantization: FrozenQuantization | None = None
    """How the frozen linear layers are kept (QLoRA, Dettmers et al. 2023); ``None``: as they are stored."""

    merge: bool = False
    """The result is the whole model with the adapter merged in, instead of the adapter alone."""

    def __post_init__(self) -> None:
        count("lora.r", self.r, at_least=1)
        finite("lora.alpha", self.alpha, above=0)
        for name in ("target_modules", "exclude_modules", "modules_to_save"):
            value = getattr(self, name)
            if value == "all-linear" and name == "target_modules":
                continue
            require(
                not isinstance(value, str) and all(isinstance(item, str) and item for item in value),
                f"lora.{name}",
                f"{short(value)} is not a list of names",
            )
            object.__setattr__(self, name, tuple(value))
        require(self.target_modules != (), "lora.target_modules", "names no module")
        if self.quantization is not None:
            one_of("lora.quantization", self.quantization, get_args(FrozenQuantization))
