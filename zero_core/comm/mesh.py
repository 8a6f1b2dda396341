"""Ranks as a grid: a row is one replica, the ranks that share one copy of the model state between them.

    world of 8, shard_size 4:   row 0 = ranks 0 1 2 3     row 1 = ranks 4 5 6 7
    column 1 = ranks 1 5: they own the same shard, of different replicas

A node's ranks are neighbours, as every launcher numbers them, so that a row or a secondary group of a
node's size stays on its fast links. One row is plain ZeRO; one column per rank is plain data parallelism.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    rank: int
    world_size: int
    shard_size: int
    node_size: int
    """Ranks of a shard group that are on one node; 1 where collectives don't tell nodes apart."""
    secondary_size: int
    """Ranks of one secondary group (hpZ); 1 where there is none."""

    def __post_init__(self) -> None:
        if self.world_size % self.shard_size:
            raise ValueError(f"shard_size: {self.shard_size} does not divide the {self.world_size} ranks")
        for name, size in (("node_size", self.node_size), ("secondary_shard_size", self.secondary_size)):
            if self.shard_size % size:
                raise ValueError(f"{name}: {size} does not divide a shard group of {self.shard_size}")

    @property
    def replica(self) -> int:
        return self.rank // self.shard_size

    def rows(self) -> list[list[int]]:
        """The shard groups."""
        return self.neighbours(self.shard_size)

    def columns(self) -> list[list[int]]:
        """The replica groups: the owners of one and the same shard."""
        return [list(range(column, self.world_size, self.shard_size)) for column in range(self.shard_size)]

    def neighbours(self, size: int) -> list[list[int]]:
        """The world cut into groups of ``size`` ranks that follow each other."""
        return [list(range(first, first + size)) for first in range(0, self.world_size, size)]

    def across_nodes(self) -> list[list[int]]:
        """In each shard group, the ranks that have the same place in their nodes."""
        return [row[place :: self.node_size] for row in self.rows() for place in range(self.node_size)]
