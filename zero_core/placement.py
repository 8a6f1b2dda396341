"""Which of a unit's three states is sharded: what a ZeRO stage means, and nothing else.

Rajbhandari et al. 2020, section 5: stage 1 partitions optimizer state, stage 2 also gradients, stage 3
also parameters.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    parameters: bool
    """Parameters are sharded between uses, and gathered for each."""

    gradients: bool
    """Gradients are reduced to their shard in every micro-batch, the full gradient is freed at once."""

    optimizer: bool
    """Each rank keeps the optimizer state of its shard alone, and updates that."""

    @classmethod
    def of(cls, stage: int, world_size: int) -> "Placement":
        """A group of one has nothing to share with: everything is whole and nothing is kept twice."""
        if world_size == 1:
            return cls(False, False, False)
        return cls(parameters=stage >= 3, gradients=stage >= 2, optimizer=stage >= 1)
