"""Bytes of the tensors that are alive, followed operation by operation. Exact, on real and on fake tensors.

Every operation that runs inside the mode is seen below autograd: what it makes counts from then on, once
for each storage, until the last tensor that has that storage is gone. What a kernel takes and gives back
inside itself is not seen.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, strided
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True)
class Alive:
    nbytes: int

    number: int
    """Operations that had made something before this one did."""

    finalizer: "weakref.finalize[Any, Any]"


class LiveBytes(TorchDispatchMode):
    def __init__(self, known: Iterable[Tensor], on_growth: Callable[[int], None]) -> None:
        """``known`` tensors never count; ``on_growth`` is told of the bytes whenever something was
        made."""
        super().__init__()
        self.current = 0
        self._growths = 0
        self._on_growth = on_growth
        self._alive: dict[int, Alive] = {}
        for tensor in known:
            self._follow(tensor, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, Tensor | tuple | list):
            return result
        made = [
            self._follow(leaf, leaf.untyped_storage().nbytes())
            for leaf in tree_leaves(result)
            if isinstance(leaf, Tensor) and leaf.layout is strided
        ]
        if any(made):
            self._growths += 1
            self._on_growth(self.current)
        return result

    def of(self, tensor: Tensor) -> Alive | None:
        """What is known of the tensor's storage; None where it was not made inside the mode."""
        return self._alive.get(tensor.untyped_storage()._cdata)

    def _follow(self, tensor: Tensor, nbytes: int) -> bool:
        """True for a storage that was not there before."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return False
        self.current += nbytes
        self._alive[key] = Alive(nbytes, self._growths, weakref.finalize(storage, self._forget, key))
        return True

    def _forget(self, key: int) -> None:
        self.current -= self._alive.pop(key).nbytes
