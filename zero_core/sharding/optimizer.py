"""The optimizer over a rank's masters: one of ``torch.optim``, an instance for some flat parameters each.

Each parameter's piece is a tensor of its own to torch, so weight-decay groups, per-parameter step counts
and leaving an unused parameter alone are torch's own behaviour, whatever the sharding. That is why the
class must be element-wise: a piece has to be updated as it would be inside the whole parameter.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_core.config.optimizer import OptimizerConfig
from zero_core.memory.arena import Arena
from zero_core.memory.ledger import Ledger
from zero_core.sharding.flat_parameter import FlatParameter
from zero_core.sharding.layout import Layout, Piece
from zero_core.sharding.program import buckets

SCALES_GRADIENTS = ("Adagrad", "Adam", "AdamW", "SGD")
"""Classes whose fused kernel divides the gradient by ``grad_scale`` on its way, saving a pass over it."""

UPDATED_AT_ONCE = 4_000_000
"""Elements: a call for each flat parameter would cost time."""

CONVERTED_AT_ONCE = 1_000_000
"""The same in lower precision: the fp32 copies of so many gradients are still in the cache when the update
reads them, and so are the new weights when they are rounded."""


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
        arena: Arena,
        ledger: Ledger,
    ) -> None:
        self._config = config
        self._arena = arena
        self._lr_schedule = lr_schedule
        self._ledger = ledger
        self._charged = 0
        self._with_state = 0
        """Pieces that have optimizer state."""
        self._parts: list[_Part] = []
        self.add(flats)

    def add(self, flats: list[FlatParameter]) -> None:
        """Train ``flats`` from the next step on."""
        sizes = [flat.master_range[1] - flat.master_range[0] for flat in flats]
        at_once = UPDATED_AT_ONCE if flats[0].policy.dtype == torch.float32 else CONVERTED_AT_ONCE
        for together in buckets(range(len(flats)), sizes, at_once):
            self._parts.append(_Part([flats[index] for index in together], self._config, self._arena))

    def lr_at(self, steps: int) -> float:
        return self._config.lr * (1.0 if self._lr_schedule is None else self._lr_schedule(steps))

    def step(self, lr: float, factor: float, used: dict[FlatParameter, list[bool]]) -> None:
        """Update this rank's masters with the reduced gradients times ``factor``, and publish them.

        ``used`` has an entry for each parameter of a flat one: an unused one is left alone, weight decay
        and momentum included, as torch leaves a parameter whose gradient is None.
        """
        for part in self._parts:
            part.step(lr, factor, used)
        # torch makes a parameter's state at its first update.
        with_state = sum(part.with_state for part in self._parts)
        if with_state != self._with_state:
            self._with_state = with_state
            self._charge()

    def owned(self) -> Iterator[Owned]:
        """Every piece with its state."""
        for part in self._parts:
            yield from part.owned()

    def restore(self, owned: Owned) -> None:
        """Make ``owned.state`` the state of its piece; the tensors are kept, not copied."""
        for part in self._parts:
            part.restore(owned)
        self._charge()

    def _charge(self) -> None:
        """Account for the state that torch allocated since the last call."""
        held = sum(part.state_bytes() for part in self._parts)
        if held >= self._charged:
            self._ledger.take("optimizer", held - self._charged)
        else:
            self._ledger.give("optimizer", self._charged - held)
        self._charged = held


@dataclass(frozen=True)
class _Master:
    """One piece of a flat parameter, and its view of the master weights."""

    flat: FlatParameter
    index: int
    """Of the parameter in the flat one."""

    piece: Piece
    values: Tensor


class _Part:
    """One optimizer of torch's; without pieces where the shards are all padding."""

    def __init__(self, flats: list[FlatParameter], config: OptimizerConfig, arena: Arena) -> None:
        self._arena = arena
        self._flats = flats
        self._masters = [master for flat in flats for master in _masters(flat)]
        self._device = flats[0].full.device
        self._optimizer = _build(self._masters, config)
        fused = self._optimizer is not None and self._optimizer.defaults.get("fused")
        self._divides = bool(fused) and config.name in SCALES_GRADIENTS

    def step(self, lr: float, factor: float, used: dict[FlatParameter, list[bool]]) -> None:
        if self._optimizer is not None:
            self._update(self._optimizer, lr, factor, used)
        # Also what is all padding here: every rank must know that its secondary shard is old.
        for flat in self._flats:
            flat.publish()

    def _update(
        self,
        optimizer: torch.optim.Optimizer,
        lr: float,
        factor: float,
        used: dict[FlatParameter, list[bool]],
    ) -> None:
        updated = [master for master in self._masters if used[master.flat][master.index]]
        gradients = [master.flat.gradient.of(master.piece, master.index) for master in updated]
        scratch = None
        if gradients and gradients[0].dtype != torch.float32:
            sizes = [gradient.numel() for gradient in gradients]
            scratch = self._arena.borrow(sum(sizes), torch.float32, "communication")
            exact = scratch.split(sizes)
            gradients = [into.copy_(gradient) for into, gradient in zip(exact, gradients, strict=True)]
        for master, gradient in zip(updated, gradients, strict=True):
            master.values.grad = gradient
        self._scale(updated, factor)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if scratch is not None:
            self._arena.give_back(scratch)

    def _scale(self, masters: list[_Master], factor: float) -> None:
        if self._divides:
            # Where torch.amp.GradScaler leaves it for the fused kernels.
            divisor = None if factor == 1.0 else torch.tensor(1.0 / factor, device=self._device)
            vars(self._optimizer)["grad_scale"] = divisor
        elif factor != 1.0:
            for master in masters:
                assert master.values.grad is not None
                master.values.grad.mul_(factor)

    def owned(self) -> Iterator[Owned]:
        for master in self._masters:
            assert self._optimizer is not None
            state = self._optimizer.state.get(master.values, {})
            kept = {key: value for key, value in state.items() if value is not None}
            yield Owned(master.piece, master.flat.layout, master.values, kept)

    def restore(self, owned: Owned) -> None:
        """Does nothing if the piece is another part's."""
        if not any(owned.master is master.values for master in self._masters):
            return
        assert self._optimizer is not None
        # torch wants the step count beside the weights for its fused kernels, else on the host.
        fused = self._optimizer.defaults.get("fused")
        self._optimizer.state[owned.master] = {
            key: value.to(owned.master.device) if value.dim() or fused else value
            for key, value in owned.state.items()
        }

    @property
    def with_state(self) -> int:
        return len(self._optimizer.state) if self._optimizer is not None else 0

    def state_bytes(self) -> int:
        return sum(value.nbytes for owned in self.owned() for value in owned.state.values())


def _masters(flat: FlatParameter) -> list[_Master]:
    index = {slot: index for index, slot in enumerate(flat.layout.slots)}
    return [_Master(flat, index[piece.slot], piece, values) for piece, values in flat.master_pieces()]


def _build(masters: list[_Master], config: OptimizerConfig) -> torch.optim.Optimizer | None:
    decayed = [master.values for master in masters if len(master.piece.slot.shape) >= 2]
    kept = [master.values for master in masters if len(master.piece.slot.shape) < 2]
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
