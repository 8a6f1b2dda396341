"""The model with its adapters merged in, unit by unit: W + scaling B A, summed in fp32 (Hu et al. 2021).

W is the base as it was trained on, dequantized where it is kept quantized; A and B are the master weights.
What writes the result rounds each sum once, to the dtype that it is stored in.
"""

from collections.abc import Iterator, Mapping

from torch import Tensor

from zero_core.checkpoints.masters import gather_masters
from zero_core.checkpoints.tensor_file import Run, StoredTensor
from zero_core.engine import ZeroEngine
from zero_core.models.adapters import AdaptedLayer, Adapters
from zero_core.models.conversion import Converted
from zero_core.models.weights import WeightFiles
from zero_core.sharding.unit import Unit


class MergedResults:
    """What of a gathered unit goes into the merged model; pass it to ``export``.

    Adapters disappear, weights and trained copies of modules take the names that they have in the base
    model, and the base's own values of what was trained whole are left out.
    """

    def __init__(self, engine: ZeroEngine, adapters: Adapters) -> None:
        """Collective: adapters outside the blocks lie in units of their own, and are gathered at once."""
        self._engine = engine
        self._names = adapters.base_names
        self._adapted: dict[str, list[AdaptedLayer]] = {}
        for layer in adapters.layers:
            self._adapted.setdefault(layer.base, []).append(layer)
        self._matrices = adapters.initial.keys()
        self._replaced = {
            name for trained, name in adapters.base_names.items() if trained in adapters.stored_keys
        }
        self._elsewhere: dict[str, Tensor] = {}
        for unit in engine.units:
            strangers = {m for layer in self._layers_without_base(unit) for m in (layer.a, layer.b)}
            if strangers:
                masters = gather_masters(engine, unit)
                self._elsewhere |= {name: masters[name].clone() for name in strangers & masters.keys()}

    def __call__(self, unit: Unit, keep: bool) -> Iterator[tuple[str, Tensor]]:
        """Names and values of the whole ``unit``, made one by one; none but for ``keep``. Collective."""
        masters = gather_masters(self._engine, unit)
        return self._results(unit, masters) if keep else iter(())

    def _layers_without_base(self, unit: Unit) -> list[AdaptedLayer]:
        """Layers of which a matrix is in the unit and the weight is not."""
        here = {slot.name for flat in unit.flats for slot in flat.layout.slots}
        layers = [layer for layers in self._adapted.values() for layer in layers]
        return [layer for layer in layers if {layer.a, layer.b} & here and layer.base not in here]

    def names(self, unit: Unit) -> Iterator[str]:
        for flat in unit.flats:
            for slot in flat.layout.slots:
                if slot.name in self._matrices:
                    continue
                if flat.trainable or self._stays(slot.name):
                    yield self._names[slot.name]
                yield from (layer.result for layer in self._adapted.get(slot.name, []))

    def _stays(self, frozen: str) -> bool:
        """The frozen parameter itself is part of the result: nothing trained takes its place."""
        name = self._names[frozen]
        layers = self._adapted.get(frozen, [])
        return name not in self._replaced and name not in [layer.result for layer in layers]

    def _results(self, unit: Unit, masters: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for flat in unit.flats:
            for slot, _, values in flat.slots():
                if slot.name in self._matrices:
                    continue
                if slot.name in masters:
                    yield self._names[slot.name], masters[slot.name]
                elif self._stays(slot.name):
                    yield self._names[slot.name], values.detach()
                for layer in self._adapted.get(slot.name, []):
                    yield layer.result, self._merged(layer, values.detach(), masters)

    def _merged(self, layer: AdaptedLayer, base: Tensor, masters: dict[str, Tensor]) -> Tensor:
        matrices = masters if layer.a in masters else self._elsewhere
        update = matrices[layer.b] @ matrices[layer.a]
        if layer.transposed:
            update = update.T
        return base.float() + update * layer.scaling


class MergedBase:
    """How a merged model is stored: as its base is, but what is tied no more has a tensor of its own."""

    def __init__(self, base: WeightFiles, adapters: Adapters) -> None:
        self._base = base
        self._untied: dict[str, str] = {}
        """By name of a result, the parameter that it was tied to."""
        stored = dict(base.stored)
        for layer in adapters.layers:
            tied = adapters.base_names[layer.base]
            if tied != layer.result:
                self._untied[layer.result] = tied
                ((_, run),) = [each for each in base.runs(tied) if each[1].key != layer.result]
                stored.setdefault(layer.result, base.stored[run.key])
        self.stored: Mapping[str, StoredTensor] = stored

    def runs(self, name: str) -> Iterator[tuple[int, Run]]:
        if name in self._untied:
            yield 0, Run(name, 0, self.stored[name].numel)
        else:
            yield from (each for each in self._base.runs(name) if each[1].key not in self._untied)

    def converted(self, name: str) -> Converted | None:
        return None if name in self._untied else self._base.converted(name)
