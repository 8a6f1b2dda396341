"""``python -m bench.predicting.rank CASE``: one rank trains a case for some steps and says what it took.

CASE is a JSON file; the answer goes beside it, a file a rank.
"""

import gc
import os
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from bench.predicting.case import Case
from bench.predicting.subjects import filled, micro_batch, subject
from zero_core import AdamWConfig, ZeroEngine
from zero_core.memory.ledger import Usage, reset_peak, resident
from zero_core.models.attention import use_packed_attention

STEPS = 3
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Taken:
    """Bytes of one rank."""

    imports: int
    """Resident before the model has memory: interpreter, libraries, process group."""

    peaks: list[int]
    """The most of each step."""

    usage: Usage
    """The engine's own account of the last one."""


def run(case: Case) -> Taken:
    _warm_up()
    # On the meta device: what it takes are the modules of the model's and the adapters' libraries.
    what, weights = subject(case)
    gc.collect()
    imports = resident().current
    reset_peak(CPU)
    model = what.model
    if case.checkpointed:
        model.activation_checkpointing_enable()
    if case.packed:
        use_packed_attention(model)
    what.prepare(model)
    engine = ZeroEngine(model, case.zero, AdamWConfig(lr=1e-4), weights=weights, device=CPU)
    peaks = []
    for _ in range(STEPS):
        engine.start_measuring()
        for _ in range(case.micro_batches):
            batch = micro_batch(case)
            inputs = filled(what.inputs(batch), batch)
            loss: Tensor = what.loss(engine, inputs)  # type: ignore[arg-type]
            engine.backward(loss, batch.targets)
            engine.step()
            del loss, inputs
        peaks.append(engine.resident().peak)
    usage = engine.memory()
    engine.communicator.barrier()
    engine.communicator.close()
    return Taken(imports, peaks, usage)


def _warm_up() -> None:
    """What is loaded or set up on first use is no memory of the engine's."""
    layer = torch.nn.Linear(64, 64)
    layer(torch.zeros(64, 64)).sum().backward()
    torch.optim.AdamW(layer.parameters(), fused=True).step()


def main(path: Path) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    taken = run(TypeAdapter(Case).validate_json(path.read_bytes()))
    answer = path.with_name(f"rank-{os.environ['RANK']}.json")
    answer.write_bytes(TypeAdapter(Taken).dump_json(taken))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
