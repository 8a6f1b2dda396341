"""Which of a unit's three states is sharded: what a ZeRO stage means, and nothing else.

Rajbhandari et al. 2020, section 5: stage 1 partitions optimizer state, stage 2 also gradients, stage 3
also parameters. What is not sharded inside a shard group is whole on each of its ranks; between the
replicas of a mesh nothing is sharded.
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
    def of(
        cls, stage: int, shard_size: int, accumulate_locally: bool = False, parameters_leave: bool = False
    ) -> "Placement":
        """A group of one has nothing to share with: everything is whole and nothing is kept twice.

        With ``accumulate_locally`` the full gradient is kept until the accumulation boundary. Where
        ``parameters_leave`` the device, at stage 3, they come and go in a group of one too.
        """
        if shard_size == 1:
            return cls(parameters_leave, False, False)
        return cls(
            parameters=stage >= 3, gradients=stage >= 2 and not accumulate_locally, optimizer=stage >= 1
        )
