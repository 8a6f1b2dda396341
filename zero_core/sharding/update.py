"""One optimizer of torch's over a bounded run of a rank's masters, brought to memory for the update.

Each parameter's piece of the run is a tensor of its own to torch, so weight-decay groups, per-parameter
step counts and leaving an unused parameter alone are torch's own behaviour, whatever the sharding. That is
why the class must be element-wise: a piece has to be updated as it would be inside the whole parameter.

Where masters or state lie off the device, the tensors that torch knows are empty between updates, and views
of what was lent during one.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_core.config.optimizer import OptimizerConfig
from zero_core.memory.arena import Arena
from zero_core.memory.tiers import Loan, Tiers, Values
from zero_core.sharding.flat_parameter import FlatParameter
from zero_core.sharding.layout import Layout, Piece

SCALES_GRADIENTS = ("Adagrad", "Adam", "AdamW", "SGD")
"""Classes whose fused kernel divides the gradient by ``grad_scale`` on its way, saving a pass over it."""


@dataclass(frozen=True)
class Run:
    """Elements [begin, end) of one flat parameter's master weights."""

    flat: FlatParameter
    begin: int
    end: int


@dataclass(frozen=True)
class Owned:
    """A piece that this rank updates, with its master weights and optimizer state."""

    piece: Piece
    layout: Layout
    """Of the flat parameter that the piece belongs to."""

    master: Tensor
    state: dict[str, Tensor]
    """torch's own: full-length tensors of the piece, and 0-dim ones for the whole parameter.

    Empty before the parameter's first update.
    """


@dataclass(frozen=True)
class Described:
    """The same without the values of full length."""

    piece: Piece
    layout: Layout
    full_length: list[str]
    """Names of the optimizer state that has a value for each element, all in fp32."""
    scalars: dict[str, Tensor]


@dataclass(frozen=True)
class _Master:
    flat: FlatParameter
    index: int
    """Of the parameter in the flat one."""

    piece: Piece
    run: int
    start: int
    """In the run."""

    at: int
    """In what is kept of the runs' state, which holds it for all of their pieces, end to end."""

    values: Tensor
    """What torch knows as the parameter."""

    leaves: bool
    """It is empty between updates."""


class Update:
    def __init__(self, runs: list[Run], config: OptimizerConfig, arena: Arena, tiers: Tiers) -> None:
        self._runs = runs
        self._config = config
        self._arena = arena
        self._tiers = tiers
        self._keeps_state = runs[0].flat.policy.homes.state == "disk"
        self._state: Values | None = None
        """All full-length state, by its names and then by piece, once there is any and it leaves memory."""
        self._names: list[str] = []
        self._stateful: set[int] = set()
        """Of these pieces, by their ``at``."""
        self._loans: list[Loan] = []
        self._state_loan: Loan | None = None
        self._masters = self._find_masters()
        self._size = sum(master.piece.length for master in self._masters)
        self._open()
        self._optimizer = _build(self._masters, config)
        fused = self._optimizer is not None and self._optimizer.defaults.get("fused")
        self._divides = bool(fused) and config.name in SCALES_GRADIENTS
        self._shut(changed=False)

    def _find_masters(self) -> list[_Master]:
        masters, at = [], 0
        for number, run in enumerate(self._runs):
            flat = run.flat
            index = {slot: index for index, slot in enumerate(flat.layout.slots)}
            first = flat.master_range[0] + run.begin
            assert flat.master is not None
            leaves = flat.master.resident is None
            for piece in flat.master_pieces(run.begin, run.end):
                start, values = piece.offset - first, torch.empty(0)
                masters.append(_Master(flat, index[piece.slot], piece, number, start, at, values, leaves))
                at += piece.length
        return masters

    # Lending.

    def fetch(self) -> None:
        """Start to bring what lies off the device."""
        if self._loans:
            return
        for run in self._runs:
            assert run.flat.master is not None
            self._loans.append(run.flat.master.borrow(run.begin, run.end))
        if self._state is not None:
            self._state_loan = self._state.borrow(0, self._state.numel)

    def _open(self) -> None:
        """Give torch's tensors their memory."""
        self.fetch()
        lent = [loan.wait() for loan in self._loans]
        for master in self._masters:
            if not master.values.numel():
                master.values.data = lent[master.run][master.start : master.start + master.piece.length]
        if self._state_loan is not None:
            for master in self._masters:
                if master.at in self._stateful:
                    self._state_of(master).update(self._views(master, self._state_loan.wait()))

    def _shut(self, changed: bool) -> None:
        """Take it back, and keep what was ``changed``."""
        if self._keeps_state and self._optimizer is not None:
            self._stow(changed)
        for master in self._masters:
            if master.leaves:
                master.values.data = master.values.new_empty(0)
        for loan in self._loans:
            loan.give_back(changed)
        self._loans = []

    def _stow(self, changed: bool) -> None:
        """Move full-length state, which torch may have just made, to where it is kept."""
        stateful = [master for master in self._masters if self._full_length(master)]
        if not stateful:
            return
        loan = self._state_loan
        if self._state is None:
            self._names = sorted(self._full_length(stateful[0]))
            self._state = self._tiers.reserve(len(self._names) * self._size, torch.float32, "optimizer")
            loan = self._state.borrow(0, self._state.numel, read=False)
            changed = True
        assert loan is not None
        for master in stateful:
            state = self._state_of(master)
            for name, kept in self._views(master, loan.wait()).items():
                if state[name].data_ptr() != kept.data_ptr():
                    kept.copy_(state[name])
                    changed = True
                state[name] = torch.empty(0)
            self._stateful.add(master.at)
        loan.give_back(changed)
        self._state_loan = None

    def _views(self, master: _Master, state: Tensor) -> dict[str, Tensor]:
        parts = zip(self._names, state.split(self._size), strict=True)
        return {name: part[master.at : master.at + master.piece.length] for name, part in parts}

    def _state_of(self, master: _Master) -> dict[str, Tensor]:
        assert self._optimizer is not None
        state: dict[str, Tensor] = self._optimizer.state[master.values]
        return state

    def _full_length(self, master: _Master) -> list[str]:
        assert self._optimizer is not None
        state = self._optimizer.state.get(master.values, {})
        return [name for name, value in state.items() if value is not None and value.dim()]

    # The step.

    def step(self, lr: float, factor: float, used: dict[FlatParameter, list[bool]]) -> None:
        """Update with the reduced gradients times ``factor``, and publish."""
        updated = [master for master in self._masters if used[master.flat][master.index]]
        self._open()
        if updated:
            self._update(updated, lr, factor)
            self._publish()
        self._shut(changed=bool(updated))

    def _publish(self) -> None:
        for run, loan in zip(self._runs, self._loans, strict=True):
            run.flat.publish(run.begin, run.end, loan.wait())

    def _update(self, updated: list[_Master], lr: float, factor: float) -> None:
        assert self._optimizer is not None
        gradients = [master.flat.gradient.of(master.piece, master.index) for master in updated]
        scratch = None
        if gradients[0].dtype != torch.float32:
            sizes = [gradient.numel() for gradient in gradients]
            scratch = self._arena.borrow(sum(sizes), torch.float32, "communication")
            exact = scratch.split(sizes)
            gradients = [into.copy_(gradient) for into, gradient in zip(exact, gradients, strict=True)]
        for master, gradient in zip(updated, gradients, strict=True):
            # The update is where the weights are.
            master.values.grad = gradient.to(master.values.device)
        self._scale(updated, factor)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if scratch is not None:
            self._arena.give_back(scratch)

    def _scale(self, masters: list[_Master], factor: float) -> None:
        if self._divides:
            # Where torch.amp.GradScaler leaves it for the fused kernels.
            device = masters[0].values.device
            divisor = None if factor == 1.0 else torch.tensor(1.0 / factor, device=device)
            vars(self._optimizer)["grad_scale"] = divisor
        elif factor != 1.0:
            for master in masters:
                assert master.values.grad is not None
                master.values.grad.mul_(factor)

    # Checkpoints.

    def owned(self, restore: bool) -> Iterator[Owned]:
        """Every piece, valid until the next is asked for.

        With ``restore``, what was put into its tensors and its ``state`` by then is the piece's from now on.
        """
        self._open()
        for master in self._masters:
            assert self._optimizer is not None
            state = self._optimizer.state.get(master.values, {})
            kept = {name: value for name, value in state.items() if value is not None}
            owned = Owned(master.piece, master.flat.layout, master.values, kept)
            yield owned
            if restore:
                self._restore(master, owned.state)
        if restore:
            self._publish()
        self._shut(changed=restore)

    def _restore(self, master: _Master, state: dict[str, Tensor]) -> None:
        assert self._optimizer is not None
        if not state:
            self._optimizer.state.pop(master.values, None)
            self._stateful.discard(master.at)
            return
        # torch wants the step count beside the weights for its fused kernels, else on the host.
        fused = self._optimizer.defaults.get("fused")
        self._optimizer.state[master.values] = {
            name: value.to(master.values.device) if value.dim() or fused else value
            for name, value in state.items()
        }

    def described(self) -> Iterator[Described]:
        for master in self._masters:
            assert self._optimizer is not None
            state = self._optimizer.state.get(master.values, {})
            scalars = {name: value for name, value in state.items() if value is not None and not value.dim()}
            yield Described(master.piece, master.flat.layout, self._full_length(master), scalars)

    @property
    def with_state(self) -> int:
        return len(self._optimizer.state) if self._optimizer is not None else 0

    def state_bytes(self) -> int:
        """In memory."""
        if self._optimizer is None:
            return 0
        states = self._optimizer.state.values()
        return sum(value.nbytes for state in states for value in state.values() if value is not None)


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
