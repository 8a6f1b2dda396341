"""Which parameter goes to which unit. The same on every rank, since it depends on the model alone.

- A unit for each block: the model's own block classes, or the items of its module lists.
- Outside the blocks, a unit for each large table: an embedding or a linear layer. Tables that share a
  parameter, as tied embeddings do, are one unit of several modules.
- The rest, norms and scales, is the root unit, which is there through all of a forward or backward.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

TABLES = (nn.Embedding, nn.Linear)
"""Exact classes: a subclass may let its parent read its parameters, as in ``nn.MultiheadAttention``."""


@dataclass(frozen=True)
class Part:
    """One unit to be: the modules whose forward needs the parameters."""

    name: str
    modules: list[nn.Module]
    parameters: list[tuple[str, nn.Parameter]]
    linear_weights: frozenset[str]
    """Of these, the weights of linear layers inside the blocks."""


def partition(model: nn.Module, unit_classes: tuple[str, ...] = ()) -> list[Part]:
    """The root unit first, then the others in the order of registration; empty ones are left out.

    A parameter that modules of two blocks share belongs to the root: it is gathered, reduced and updated
    once. Parameters of integer dtypes stay as they are on every rank: they have no gradient.
    """
    claims = {"": [model]} | _blocks(model, unit_classes)
    inside = {
        id(module) for name, modules in claims.items() if name for m in modules for module in m.modules()
    }
    for name, module in model.named_modules():
        if name and type(module) in TABLES and id(module) not in inside:
            claims[name] = [module]
    claims = {name: claims[name] for name, _ in model.named_modules() if name in claims}
    owners: dict[int, set[str]] = {}
    for name, (module, *_) in claims.items():
        if name:
            for parameter in module.parameters():
                owners.setdefault(id(parameter), set()).add(name)
    claimed = inside | {id(modules[0]) for name, modules in claims.items() if name}
    for module in model.modules():
        if id(module) not in claimed:
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), set()).add("")
    return _parts(model, claims, owners, _linear_weights(model, inside))


def _linear_weights(model: nn.Module, inside: set[int]) -> set[int]:
    """Ids of the parameters that are weights of linear layers inside the blocks, and nothing else."""
    linear: set[int] = set()
    others: set[int] = set()
    for module in model.modules():
        of_block = id(module) in inside and isinstance(module, nn.Linear)
        for name, parameter in module.named_parameters(recurse=False):
            (linear if of_block and name == "weight" else others).add(id(parameter))
    return linear - others


def _parts(
    model: nn.Module, claims: dict[str, list[nn.Module]], owners: dict[int, set[str]], linear: set[int]
) -> list[Part]:
    parameters: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in claims}
    modules = {name: list(claimed) for name, claimed in claims.items()}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            holders = owners[id(parameter)]
            holder = _common_holder(holders, claims)
            parameters[holder].append((name, parameter))
            if holder:
                modules[holder] += [claims[other][0] for other in sorted(holders - {holder})]
    return [
        Part(name, _distinct(modules[name]), held, frozenset(key for key, p in held if id(p) in linear))
        for name, held in parameters.items()
        if held
    ]


def _common_holder(holders: set[str], claims: dict[str, list[nn.Module]]) -> str:
    """The unit that a parameter of several claimants belongs to: of tables the first, else the root."""
    if len(holders) == 1:
        return next(iter(holders))
    if all(name and type(claims[name][0]) in TABLES for name in holders):
        return next(name for name in claims if name in holders)
    return ""


def _distinct(modules: list[nn.Module]) -> list[nn.Module]:
    return list({id(module): module for module in modules}.values())


def _blocks(model: nn.Module, unit_classes: tuple[str, ...]) -> dict[str, list[nn.Module]]:
    """Modules of the named classes, else of the model's own block classes, else the items of its lists."""
    classes = set(unit_classes) or _declared_block_classes(model)
    if classes:
        found = [(name, m) for name, m in model.named_modules() if name and type(m).__name__ in classes]
        missing = set(unit_classes) - {type(module).__name__ for _, module in found}
        if missing:
            raise ValueError(f"unit_classes: the model has no module of class {', '.join(sorted(missing))}")
    else:
        lists = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
        found = [(f"{name}.{i}", block) for name, blocks in lists for i, block in enumerate(blocks)]
    return {name: [module] for name, module in _outermost(found).items()}


def _declared_block_classes(model: nn.Module) -> set[str]:
    """``_no_split_modules`` of Hugging Face models, wherever in the tree the model that has it sits."""
    for module in model.modules():
        declared: Iterable[str] | None = getattr(module, "_no_split_modules", None)
        if declared:
            return set(declared)
    return set()


def _outermost(found: list[tuple[str, nn.Module]]) -> dict[str, nn.Module]:
    chosen: dict[str, nn.Module] = {}
    seen: set[int] = set()
    for name, module in found:
        if id(module) in seen:
            continue
        chosen[name] = module
        seen.update(id(inner) for inner in module.modules())
    return chosen
