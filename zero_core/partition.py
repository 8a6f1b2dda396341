"""Which parameter goes to which unit. The same on every rank, since it depends on the model alone."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Part:
    """One unit to be: the module whose forward needs the parameters."""

    name: str
    module: nn.Module
    parameters: list[tuple[str, nn.Parameter]]


def partition(model: nn.Module, unit_classes: tuple[str, ...] = ()) -> list[Part]:
    """The root unit, then a unit for each block in the order of registration; empty ones are left out.

    A parameter that modules of two units share belongs to the root, which holds it through all of
    forward: it is gathered, reduced and updated once.
    """
    blocks = _blocks(model, unit_classes)
    owners: dict[int, set[str]] = {}
    for name, block in blocks.items():
        for parameter in block.parameters():
            owners.setdefault(id(parameter), set()).add(name)
    inside = {id(module) for block in blocks.values() for module in block.modules()}
    for module in model.modules():
        if id(module) not in inside:
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), set()).add("")

    parameters: dict[str, list[tuple[str, nn.Parameter]]] = {name: [] for name in ("", *blocks)}
    for name, parameter in model.named_parameters():
        holders = owners[id(parameter)]
        parameters[holders.copy().pop() if len(holders) == 1 else ""].append((name, parameter))
    modules = {"": model, **blocks}
    return [Part(name, modules[name], held) for name, held in parameters.items() if held]


def _blocks(model: nn.Module, unit_classes: tuple[str, ...]) -> dict[str, nn.Module]:
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
    return _outermost(found)


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
