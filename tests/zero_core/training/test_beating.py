"""Reading and writing a model is progress, however slow the disk: a beat for each part of it."""

from pathlib import Path

import torch

from tests.zero_core.architectures import write_architecture
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine
from zero_core.checkpoints.export import Parameters, export
from zero_core.models.loading import open_model
from zero_core.training.beating import BeatingResults, BeatingWeights
from zero_core.training.journal import Journal


class Counting(Journal):
    beats = 0

    def beat(self) -> None:
        super().beat()
        self.beats += 1


def test_every_parameter_read_and_every_unit_written_is_a_beat(tmp_path: Path) -> None:
    base = write_architecture(tmp_path / "base", "llama")
    opened = open_model(base, torch.float32)
    journal = Counting(tmp_path, rank=0)
    before = journal.beats
    weights = BeatingWeights(opened.weights, journal)
    engine = ZeroEngine(opened.model, ZeroConfig(), AdamWConfig(), weights=weights)
    parameters = sum(len(flat.layout.slots) for unit in engine.units for flat in unit.flats)
    assert journal.beats - before == parameters
    before = journal.beats
    export(engine, tmp_path / "out", opened.weights, lambda _: None, BeatingResults(Parameters(), journal))
    assert journal.beats - before == len(engine.units) > 2
    engine.close()
