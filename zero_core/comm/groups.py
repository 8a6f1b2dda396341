"""Ranks that do something together, with the process group in which they do it."""

from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from zero_core.comm.board import Board
from zero_core.comm.mesh import Mesh


@dataclass
class Group:
    """Some ranks, this one among them, and a process group of theirs for one purpose."""

    ranks: tuple[int, ...]
    rank: int
    """This rank's position in ``ranks``."""
    handle: dist.ProcessGroup | None
    """None for a group of one, and once the group was given up."""
    board: Board | None = None
    """Of the peers whose memory this rank reads; None where there are none."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def peers(self) -> list[int]:
        """Positions of the others, each starting with its next, so that not all send to the first first."""
        return [(self.rank + distance) % self.size for distance in range(1, self.size)]

    @property
    def reads_all(self) -> bool:
        """This rank reads the memory of all the others."""
        return self.board is not None and len(self.board.peers) == self.size - 1

    @classmethod
    def make(cls, all_ranks: list[list[int]], timeout: timedelta, backend: str | None = None) -> "Group":
        """The one of ``all_ranks`` that this rank is in. Collective over the default group."""
        me = dist.get_rank() if dist.is_initialized() else 0
        mine = next(ranks for ranks in all_ranks if me in ranks)
        handle = None
        if len(mine) > 1:
            handle, _ = dist.new_subgroups_by_enumeration(all_ranks, timeout=timeout, backend=backend)
        return cls(tuple(mine), mine.index(me), handle)


@dataclass
class Hierarchy:
    """A shard group as two: this rank's node, and its counterparts on the others; or one, and itself."""

    inside: Group
    across: Group

    @property
    def both(self) -> tuple[Group, Group]:
        return self.inside, self.across

    @property
    def shard_index(self) -> int:
        """Which of the equal shards of a flat buffer is this rank's: those of a node are not neighbours."""
        return self.inside.rank * self.across.size + self.across.rank

    @classmethod
    def make(cls, mesh: Mesh, timeout: timedelta) -> "Hierarchy":
        if mesh.node_size == 1:
            singles = mesh.neighbours(1)
            return cls(Group.make(mesh.rows(), timeout), Group.make(singles, timeout))
        inside = Group.make(mesh.neighbours(mesh.node_size), timeout)
        return cls(inside, Group.make(mesh.across_nodes(), timeout))
