"""The optimizer over a rank's masters: one of ``torch.optim``, an instance for each flat parameter.

Each parameter's piece is a tensor of its own to torch, so weight-decay groups, per-parameter step counts
and leaving an unused parameter alone are torch's own behaviour, whatever the sharding. That is why the
class must be element-wise: a piece has to be updated as it would be inside the whole parameter.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_core.config import OptimizerConfig
from zero_core.flat_parameter import FlatParameter
from zero_core.layout import Layout, Piece
from zero_core.memory import Ledger

SCALES_GRADIENTS = ("Adagrad", "Adam", "AdamW", "SGD")
"""Classes whose fused kernel divides the gradient by ``grad_scale`` on its way, saving a pass over it."""


@dataclass(frozen=True)
class Owned:
    """A parameter's piece that this rank updates, with its master weights and optimizer state."""

    piece: Piece
    layout: Layout
    """Of the flat parameter that the piece belongs to."""

    master: Tensor
    state: dict[str, Tensor]
    """torch's own: full-length tensors of the piece, and 0-dim ones for the whole parameter.

    Empty before the parameter's first update.
    """


class ShardedOptimizer:
    def __init__(
        self,
        flats: list[FlatParameter],
        config: OptimizerConfig,
        lr_schedule: Callable[[int], float] | None,
        ledger: Ledger,
    ) -> None:
        self._config = config
        self._lr_schedule = lr_schedule
        self._ledger = ledger
        self._charged = 0
        self._parts: list[_Part] = []
        for flat in flats:
            self.add(flat)

    def add(self, flat: FlatParameter) -> None:
        """Train ``flat`` from the next step on."""
        self._parts.append(_Part(flat, self._config))

    def lr_at(self, steps: int) -> float:
        return self._config.lr * (1.0 if self._lr_schedule is None else self._lr_schedule(steps))

    def step(self, lr: float, factor: float, used: dict[FlatParameter, list[bool]]) -> None:
        """Update this rank's masters with the reduced gradients times ``factor``.

        ``used`` has an entry for each parameter of a flat one: an unused one is left alone, weight decay
        and momentum included, as torch leaves a parameter whose gradient is None.
        """
        for part in self._parts:
            part.step(lr, factor, used[part.flat])
        self._charge()

    def owned(self) -> Iterator[Owned]:
        """Every piece with its state."""
        for part in self._parts:
            yield from part.owned()

    def restore(self, owned: Owned) -> None:
        """Make ``owned.state`` the state of its piece; the tensors are kept, not copied."""
        for part in self._parts:
            if part.flat.layout is owned.layout:
                part.restore(owned.master, owned.state)
        self._charge()

    def _charge(self) -> None:
        """Account for the state that torch allocated since the last call."""
        held = sum(part.state_bytes() for part in self._parts)
        if held >= self._charged:
            self._ledger.take("optimizer", held - self._charged)
        else:
            self._ledger.give("optimizer", self._charged - held)
        self._charged = held


class _Part:
    """The optimizer of one flat parameter's pieces; without pieces where the shard is all padding."""

    def __init__(self, flat: FlatParameter, config: OptimizerConfig) -> None:
        self.flat = flat
        self._pieces = flat.master_pieces()
        self._index = {slot: index for index, slot in enumerate(flat.layout.slots)}
        self._optimizer = _build(self._pieces, config)
        fused = self._optimizer is not None and self._optimizer.defaults.get("fused")
        self._divides = bool(fused) and config.name in SCALES_GRADIENTS

    def step(self, lr: float, factor: float, used: list[bool]) -> None:
        if self._optimizer is None:
            return
        masters = []
        for piece, master in self._pieces:
            index = self._index[piece.slot]
            if used[index]:
                master.grad = self.flat.gradient.of(piece, index).to(master.dtype)
                masters.append(master)
        self._scale(masters, factor)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _scale(self, masters: list[Tensor], factor: float) -> None:
        if self._divides:
            # Where torch.amp.GradScaler leaves it for the fused kernels.
            divisor = None if factor == 1.0 else torch.tensor(1.0 / factor, device=self.flat.full.device)
            vars(self._optimizer)["grad_scale"] = divisor
        elif factor != 1.0:
            for master in masters:
                assert master.grad is not None
                master.grad.mul_(factor)

    def owned(self) -> Iterator[Owned]:
        for piece, master in self._pieces:
            assert self._optimizer is not None
            state = self._optimizer.state.get(master, {})
            yield Owned(piece, self.flat.layout, master, {k: v for k, v in state.items() if v is not None})

    def restore(self, master: Tensor, state: dict[str, Tensor]) -> None:
        assert self._optimizer is not None
        # torch wants the step count beside the weights for its fused kernels, else on the host.
        fused = self._optimizer.defaults.get("fused")
        self._optimizer.state[master] = {
            key: value.to(master.device) if value.dim() or fused else value for key, value in state.items()
        }

    def state_bytes(self) -> int:
        return sum(value.nbytes for owned in self.owned() for value in owned.state.values())


def _build(pieces: list[tuple[Piece, Tensor]], config: OptimizerConfig) -> torch.optim.Optimizer | None:
    decayed = [master for piece, master in pieces if len(piece.slot.shape) >= 2]
    kept = [master for piece, master in pieces if len(piece.slot.shape) < 2]
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((decayed, config.weight_decay), (kept, 0.0))
        if params
    ]
    if not groups:
        return None
    kind = getattr(torch.optim, config.name)
    options = dict(config.options)
    accepted = inspect.signature(kind).parameters
    unknown = sorted(options.keys() - accepted.keys())
    if unknown:
        raise ValueError(f"optimizer options: {config.name} has no option {', '.join(unknown)}")
    if "fused" in accepted:
        # SGD's fused kernel can't start momentum for some parameters only.
        options.setdefault("fused", not options.get("momentum"))
    if "weight_decay" not in accepted:
        if config.weight_decay:
            raise ValueError(f"weight_decay: {config.name} has no weight decay")
        groups = [{"params": group["params"]} for group in groups]
    optimizer: torch.optim.Optimizer = kind(groups, lr=config.lr, **options)
    return optimizer
