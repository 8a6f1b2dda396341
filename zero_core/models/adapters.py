"""LoRA through peft on a model that the engine takes over: what is added, and where its values come from.

``add_lora`` changes the model in place and adds no wrapper. It works on the meta device as well: the base's
weights are then read slice by slice as before, under the names that they had (``Adapters.weights``).

The initial values are peft's (Hu et al. 2021, section 4.1): A uniform, B zero. Each A is drawn from a
generator of its own, seeded by its name, so that no rank, stage or order of construction can change it.
"""

import copy
import hashlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.constants import EMBEDDING_LAYER_NAMES
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from zero_core.config.lora import LoraConfig
from zero_core.models.adapter_targets import Targets, find_targets
from zero_core.sharding.flat_parameter import Weights

ADAPTER = "default"
"""peft's name for a model's only adapter; it is no part of what is stored."""

STORED_PREFIX = "base_model.model."
"""peft names what it stores as seen from its wrapper around the model."""


@dataclass(frozen=True)
class AdaptedLayer:
    """Names are the parameters' own in the model with adapters, but for ``result``."""

    base: str
    """A tied weight has one name, that of its first holder."""

    result: str
    """What the weight is called in the base model."""

    a: str
    """(r, in)"""

    b: str
    """(out, r)"""

    scaling: float
    transposed: bool
    """The weight is (in, out)."""


@dataclass(frozen=True)
class Adapters:
    """The adapters of one model."""

    model: PreTrainedModel
    config: peft.LoraConfig
    """As it is stored beside the adapter: targets resolved, ready for inference."""

    layers: tuple[AdaptedLayer, ...]
    base_names: Mapping[str, str]
    """By parameter that starts from the base's values, its name in the base model. Trained copies have
    the name of what they are a copy of."""

    initial: Mapping[str, "_Initial"]
    """By parameter of an adapter."""

    stored_keys: Mapping[str, tuple[str, ...]]
    """By trained parameter, what peft calls it in a file; a shared one has several keys."""

    notes: tuple[str, ...]
    """What the job should warn of."""

    unties: bool
    """A merged model has values of its own for an output layer that was tied: its config must say so."""

    def weights(self, base: Weights) -> Weights:
        """``weights=`` for the engine; ``base`` goes by the names that the model had before ``add_lora``."""
        return _AdaptedWeights(self, base)

    def write_config(self, directory: Path, base_model: str) -> None:
        """peft's ``adapter_config.json``."""
        config = copy.deepcopy(self.config)
        config.base_model_name_or_path = base_model
        config.save_pretrained(str(directory))

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside the block the model is the base model; trained copies of modules rest as well."""
        self._enable(False)
        try:
            yield
        finally:
            self._enable(True)

    def _enable(self, enabled: bool) -> None:
        for module in self.model.modules():
            if isinstance(module, BaseTunerLayer | ModulesToSaveWrapper):
                module.enable_adapters(enabled)


@dataclass(frozen=True)
class _Initial:
    """Initial values of one matrix, computed anew whenever they are asked for."""

    name: str
    shape: tuple[int, ...]
    seed: int

    def values(self) -> Tensor:
        """In fp32. Kaiming's uniform with a = sqrt(5), as peft takes, has bounds of 1/sqrt(in)."""
        values = torch.zeros(self.shape)
        if f".lora_A.{ADAPTER}." in self.name:
            digest = hashlib.sha256(f"{self.seed}:{self.name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
            bound = self.shape[1] ** -0.5
            values.uniform_(-bound, bound, generator=generator)
        return values


class _AdaptedWeights:
    def __init__(self, adapters: Adapters, base: Weights) -> None:
        self._adapters = adapters
        self._base = base

    def read(self, name: str, start: int, length: int) -> Tensor:
        initial = self._adapters.initial.get(name)
        if initial is not None:
            return initial.values().view(-1)[start : start + length]
        return self._base.read(self._adapters.base_names[name], start, length)

    def stored_dtype(self, name: str) -> torch.dtype:
        if name in self._adapters.initial:
            return torch.float32
        return self._base.stored_dtype(self._adapters.base_names[name])


def add_lora(model: PreTrainedModel, config: LoraConfig, seed: int) -> Adapters:
    """Freeze ``model`` and add adapters to it, in place, with initial values that ``seed`` decides.

    Adapters of a model on the meta device are there too, and get their values from ``Adapters.weights``;
    else they are real and in fp32, so that master weights start from them unrounded. Raises ValueError,
    naming the field, for names that match nothing.
    """
    targets = find_targets(model, config)
    base_names = {id(parameter): name for name, parameter in model.named_parameters()}
    with warnings.catch_warnings():
        # Of a tie that it would leave undone, which is kept below, and of fan_in_fan_out, set by layer.
        warnings.simplefilter("ignore", UserWarning)
        peft.inject_adapter_in_model(_peft_config(config, targets), model, ADAPTER, low_cpu_mem_usage=True)
    _tie_copies(model, targets)
    initial = {
        name: _Initial(name, tuple(parameter.shape), seed)
        for name, parameter in model.named_parameters()
        if f".lora_A.{ADAPTER}." in name or f".lora_B.{ADAPTER}." in name
    }
    if not any(parameter.is_meta for name, parameter in model.named_parameters() if name not in initial):
        _fill(model, initial)
    return _describe(model, config, targets, base_names, initial)


def _peft_config(config: LoraConfig, targets: Targets) -> peft.LoraConfig:
    # peft says int and takes both; what else reads the file expects an integer where it is one.
    alpha: Any = int(config.alpha) if config.alpha == int(config.alpha) else config.alpha
    return peft.LoraConfig(
        task_type=peft.TaskType.CAUSAL_LM,
        r=config.r,
        lora_alpha=alpha,
        lora_dropout=0.0,
        target_modules=list(targets.endings),
        modules_to_save=list(targets.whole) or None,
        use_rslora=config.use_rslora,
        fan_in_fan_out=targets.transposed,
        bias="none",
    )


def _tie_copies(model: nn.Module, targets: Targets) -> None:
    """peft copies modules that are trained whole one by one; those of one weight share their copy, too."""
    copies: dict[int, nn.Parameter] = {}
    for name in targets.whole:
        for path, original, copied in _copied(model, name):
            shared = copies.setdefault(id(original), copied.get_parameter(path))
            _put(copied, path, shared)


def _copied(model: nn.Module, whole: str) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    """Of a module trained whole: each parameter's path in it, the original, and the copied module."""
    wrapper = model.get_submodule(whole)
    assert isinstance(wrapper, ModulesToSaveWrapper), whole
    for path, original in list(wrapper.original_module.named_parameters()):
        yield path, original, wrapper.modules_to_save[ADAPTER]


def _put(module: nn.Module, path: str, parameter: nn.Parameter) -> None:
    owner, _, attribute = path.rpartition(".")
    setattr(module.get_submodule(owner), attribute, parameter)


def _fill(model: nn.Module, initial: Mapping[str, _Initial]) -> None:
    device = next(parameter.device for parameter in model.parameters() if not parameter.is_meta)
    for name, matrix in initial.items():
        _put(model, name, nn.Parameter(matrix.values().to(device)))


def _describe(
    model: PreTrainedModel,
    config: LoraConfig,
    targets: Targets,
    base_names: Mapping[int, str],
    initial: Mapping[str, _Initial],
) -> Adapters:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    started_from = {name: base_names[key] for key, name in names.items() if key in base_names}
    stored = {name: [STORED_PREFIX + name.replace(f".{ADAPTER}.", ".")] for name in initial}
    for whole in targets.whole:
        for path, original, copied in _copied(model, whole):
            trained = names[id(copied.get_parameter(path))]
            started_from[trained] = base_names[id(original)]
            stored.setdefault(trained, []).append(f"{STORED_PREFIX}{whole}.{path}")
    layers = tuple(_adapted(model, name, names) for name in targets.layers)
    stored_config = _peft_config(config, targets)
    stored_config.inference_mode = True
    # peft keeps a tie when asked to, but only of modules that are called as Llama's are.
    stored_config.ensure_weight_tying = any(len(keys) > 1 for keys in stored.values()) and any(
        name.rpartition(".")[2] in EMBEDDING_LAYER_NAMES for name in targets.whole
    )
    return Adapters(
        model=model,
        config=stored_config,
        layers=layers,
        base_names=started_from,
        initial=initial,
        stored_keys={name: tuple(keys) for name, keys in stored.items()},
        notes=targets.notes,
        unties=any(started_from[layer.base] != layer.result for layer in layers),
    )


def _adapted(model: nn.Module, name: str, names: Mapping[int, str]) -> AdaptedLayer:
    layer = model.get_submodule(name)
    assert isinstance(layer, LoraLayer), name
    return AdaptedLayer(
        base=names[id(layer.base_layer.weight)],
        result=f"{name}.weight",
        a=f"{name}.lora_A.{ADAPTER}.weight",
        b=f"{name}.lora_B.{ADAPTER}.weight",
        scaling=layer.scaling[ADAPTER],
        transposed=isinstance(layer.base_layer, Conv1D),
    )
