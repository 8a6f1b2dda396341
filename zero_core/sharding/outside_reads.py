"""Finds the tables whose parameters are read outside of their module's forward.

A model may use ``self.embedding.weight`` as the matrix of its logits without calling a module for it. A
unit that is gathered for its module's forward alone would be gone by then. So in the first forward of its
kind all tables are held, every torch function is watched, and those that were read from outside are held
in all later passes.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from zero_core.sharding.unit import Unit


class OutsideReads(TorchFunctionMode):
    def __init__(self, tables: Iterable[Unit]) -> None:
        super().__init__()
        self._owner = {p: unit for unit in tables for flat in unit.flats for p in flat.parameters}
        self.found: set[Unit] = set()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        # Shapes, dtypes and devices may be asked at any time: what returns no tensor has read no value.
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, nn.Parameter) and leaf in self._owner:
                    unit = self._owner[leaf]
                    if not unit.running:
                        self.found.add(unit)
        return result
