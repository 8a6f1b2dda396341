"""The model with its adapters merged in, unit by unit: W + scaling B A, summed in fp32 (Hu et al. 2021).

W is the base as it was trained on, dequantized where it is kept quantized; A and B are the master weights.
What writes the result rounds each sum once, to the dtype that it is stored in.
"""

from collections.abc import Iterator

from torch import Tensor

from zero_core.checkpoints.masters import gather_masters
from zero_core.engine import ZeroEngine
from zero_core.models.adapters import AdaptedLayer, Adapters
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

    def _results(self, unit: Unit, masters: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for flat in unit.flats:
            for slot, _, values in flat.slots():
                if slot.name in self._matrices:
                    continue
                name = self._names[slot.name]
                layers = self._adapted.get(slot.name, [])
                if slot.name in masters:
                    yield name, masters[slot.name]
                elif name not in self._replaced and name not in [layer.result for layer in layers]:
                    yield name, values.detach()
                for layer in layers:
                    yield layer.result, self._merged(layer, values.detach(), masters)

    def _merged(self, layer: AdaptedLayer, base: Tensor, masters: dict[str, Tensor]) -> Tensor:
        matrices = masters if layer.a in masters else self._elsewhere
        update = matrices[layer.b] @ matrices[layer.a]
        if layer.transposed:
            update = update.T
        return base.float() + update * layer.scaling
