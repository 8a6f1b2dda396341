"""Which layers of a model LoRA adapts, and which it trains whole, from what a ``LoraConfig`` names.

Pure: the model is only looked at. Every name that matches nothing is refused, since peft would go on
without it, and the job would train something else than was asked for.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from zero_core.config.lora import LoraConfig

LINEAR = (nn.Linear, Conv1D)
"""Exact classes: a subclass may return something else, as Llama 4's router does, or let its parent read its
weight. ``Conv1D``, GPT-2's, keeps its weight as (in, out)."""


@dataclass(frozen=True)
class Targets:
    layers: tuple[str, ...]
    """Full names of the adapted layers, in the model's order."""

    endings: tuple[str, ...]
    """The same as peft stores it: the shortest endings that match these layers and no other module."""

    whole: tuple[str, ...]
    """Full names of the modules that are trained whole, those that share a weight with one included."""

    transposed: bool
    """There is a ``Conv1D`` among the layers."""

    notes: tuple[str, ...]
    """What a person should know of the choice."""


def find_targets(model: PreTrainedModel, config: LoraConfig) -> Targets:
    """Raises ValueError, naming the field, for names without a match and where nothing is left to adapt."""
    modules = dict(model.named_modules())
    linear = [name for name, module in modules.items() if type(module) in LINEAR]
    named = _matches(modules, config.modules_to_save, "modules_to_save", "module", modules)
    whole = _with_shared(model, named)
    if config.target_modules == "all-linear":
        wanted = {name for name in linear if modules[name] is not model.get_output_embeddings()}
    else:
        wanted = _matches(linear, config.target_modules, "target_modules", "linear layer", linear)
    excluded = _matches(modules, config.exclude_modules, "exclude_modules", "module", linear)
    left_out = excluded | whole
    chosen = [name for name in linear if name in wanted and not _inside(name, left_out)]
    if not chosen:
        raise ValueError(
            "lora.target_modules: no layer is left to adapt beside exclude_modules and modules_to_save; "
            f"linear layers of the model: {_listed(linear)}"
        )
    return Targets(
        layers=tuple(chosen),
        endings=_endings(chosen, modules),
        whole=tuple(name for name in modules if name in whole),
        transposed=any(isinstance(modules[name], Conv1D) for name in chosen),
        notes=(*_shared_notes(named, whole), *_fused_notes(model, config)),
    )


def _matches(
    candidates: Iterable[str], endings: Iterable[str], field: str, kind: str, known: Iterable[str]
) -> set[str]:
    """The candidates with one of these endings, by peft's rule: a whole name, or what follows a dot."""
    names = [name for name in candidates if name]
    matched: set[str] = set()
    for ending in endings:
        found = {name for name in names if _ends(name, ending)}
        if not found:
            raise ValueError(
                f"lora.{field}: {ending!r} is no {kind} of the model; it has {_listed(filter(None, known))}"
            )
        matched |= found
    return matched


def _ends(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f".{ending}")


def _inside(name: str, modules: Iterable[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _endings(chosen: list[str], modules: Iterable[str]) -> tuple[str, ...]:
    shortest = {name.rpartition(".")[2] for name in chosen}
    matched = {name for name in modules if any(_ends(name, ending) for ending in shortest)}
    return tuple(sorted(shortest if matched == set(chosen) else chosen))


def _with_shared(model: nn.Module, named: set[str]) -> set[str]:
    """Modules that hold a parameter of one of ``named`` themselves: else training would undo the tie."""
    holders: dict[int, set[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), set()).add(name)
    whole = set(named)
    for name in named:
        for parameter in model.get_submodule(name).parameters():
            whole |= {holder for holder in holders[id(parameter)] if not _inside(holder, named)}
    return whole


def _shared_notes(named: set[str], whole: set[str]) -> list[str]:
    if whole == named:
        return []
    return [
        f"lora.modules_to_save: {', '.join(sorted(whole - named))} shares its weight with "
        f"{', '.join(sorted(named))}: it is trained as one and stays shared"
    ]


def _fused_notes(model: nn.Module, config: LoraConfig) -> list[str]:
    """Experts that lie in one parameter are no layers: peft adapts them by other means, and we don't."""
    fused = {
        name
        for module in model.modules()
        if not isinstance(module, nn.Conv1d)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() == 3
    }
    if not fused or config.target_modules != "all-linear":
        return []
    return [
        f"lora.target_modules: experts that are stored as one ({', '.join(sorted(fused))}) are left alone"
    ]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(
        sorted({name.rpartition(".")[2] for name in names if not name.endswith(tuple("0123456789"))})
    )
