"""Direct preference optimization: its one number."""

from dataclasses import dataclass

from zero_core.config.checks import finite


@dataclass(frozen=True)
class DpoConfig:
    """Direct preference optimization (Rafailov et al. 2023)."""

    beta: float = 0.1
    """How far the model may move from where it started: the larger, the less. In (0, 2], as OpenAI's."""

    def __post_init__(self) -> None:
        finite("dpo.beta", self.beta, above=0, at_most=2)
