"""The optimizer over a rank's masters: ``torch.optim.AdamW``, one instance for each flat parameter.

Each parameter's piece is a tensor of its own to torch, so weight-decay groups, per-parameter step counts
and leaving an unused parameter alone are torch's own behaviour, whatever the sharding.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_core.config import AdamWConfig
from zero_core.flat_parameter import FlatParameter
from zero_core.layout import Layout, Piece
from zero_core.memory import Ledger


@dataclass(frozen=True)
class Owned:
    """A parameter's piece that this rank updates, with its master weights and optimizer state."""

    piece: Piece
    layout: Layout
    """Of the flat parameter that the piece belongs to."""

    master: Tensor
    state: dict[str, Tensor]
    """torch's own state: full-length tensors of the piece, and 0-dim ones for the whole parameter."""


class ShardedOptimizer:
    def __init__(
        self,
        flats: list[FlatParameter],
        config: AdamWConfig,
        lr_schedule: Callable[[int], float] | None,
        ledger: Ledger,
    ) -> None:
        self._flats = flats
        self._config = config
        self._lr_schedule = lr_schedule
        self._ledger = ledger
        self._pieces = [flat.master_pieces() for flat in flats]
        self._optimizers = [self._build(pieces) for pieces in self._pieces]
        self._charged = 0

    def _build(self, pieces: list[tuple[Piece, Tensor]]) -> torch.optim.Optimizer | None:
        """None where this rank's shard is all padding."""
        decayed = [master for piece, master in pieces if len(piece.slot.shape) >= 2]
        kept = [master for piece, master in pieces if len(piece.slot.shape) < 2]
        groups = [
            {"params": params, "weight_decay": decay}
            for params, decay in ((decayed, self._config.weight_decay), (kept, 0.0))
            if params
        ]
        if not groups:
            return None
        return torch.optim.AdamW(
            groups, lr=self._config.lr, betas=self._config.betas, eps=self._config.eps, fused=True
        )

    def lr_at(self, steps: int) -> float:
        return self._config.lr * (1.0 if self._lr_schedule is None else self._lr_schedule(steps))

    def step(self, lr: float, factor: float, used: list[bool]) -> None:
        """Update this rank's masters with the reduced gradients times ``factor``.

        ``used`` has an entry a parameter, in the flats' order: an unused one is left alone, weight decay
        and momentum included, as torch leaves a parameter whose gradient is None.
        """
        first = 0
        for flat, pieces, optimizer in zip(self._flats, self._pieces, self._optimizers, strict=True):
            flags = dict(zip(flat.layout.slots, used[first:], strict=False))
            first += len(flat.layout.slots)
            if optimizer is None:
                continue
            gradient = flat.reduced_grad().to(torch.float32)
            gradient.mul_(factor)
            begin, _ = flat.master_range
            for piece, master in pieces:
                if flags[piece.slot]:
                    master.grad = gradient[piece.offset - begin : piece.offset - begin + piece.length]
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._charge()

    def owned(self) -> list[Owned]:
        """Every piece with its state, creating what torch would create at the first step."""
        self.materialize()
        return [
            Owned(piece, flat.layout, master, optimizer.state[master])
            for flat, pieces, optimizer in zip(self._flats, self._pieces, self._optimizers, strict=True)
            if optimizer is not None
            for piece, master in pieces
        ]

    def materialize(self) -> None:
        """Give every piece its zero state, so that loading and saving need not ask what exists."""
        for pieces, optimizer in zip(self._pieces, self._optimizers, strict=True):
            for _, master in pieces:
                assert optimizer is not None
                if not optimizer.state[master]:
                    optimizer.state[master] = {
                        "step": torch.zeros((), dtype=torch.float32, device=master.device),
                        "exp_avg": torch.zeros_like(master),
                        "exp_avg_sq": torch.zeros_like(master),
                    }
        self._charge()

    def _charge(self) -> None:
        """Account for the state that torch allocated since the last call."""
        held = sum(
            tensor.nbytes
            for optimizer in self._optimizers
            if optimizer is not None
            for state in optimizer.state.values()
            for tensor in state.values()
        )
        self._ledger.take("optimizer", held - self._charged)
        self._charged = held
