"""The trained adapter alone, in the format that peft and vLLM read: one file of a few MB and its config.

Units are gathered one after the other, and of each only what was trained. Written by rank 0 aside, synced,
renamed.

Values are fp32, the master weights as they were trained. Rounded to the base's dtype they would lose most
of what a small learning rate has moved, and a reader that wants less rounds them itself: peft keeps the
adapter in fp32 beside a base in bf16, vLLM casts it to the dtype it serves in.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from zero_core.checkpoints import durable
from zero_core.checkpoints.checkpoint import all_or_none
from zero_core.checkpoints.export import Exported
from zero_core.checkpoints.masters import gather_masters
from zero_core.engine import ZeroEngine

FILE = "adapter_model.safetensors"
READABLE = 0o644
"""safetensors creates files that only their owner can read."""


def export_adapter(
    engine: ZeroEngine,
    path: Path,
    stored_keys: Mapping[str, tuple[str, ...]],
    write_beside: Callable[[Path], None],
) -> Exported | None:
    """Write what ``engine`` trains to ``path``, replacing what is there. Collective; rank 0 gets the answer.

    ``stored_keys`` has what each trained parameter is called in the file, once or more. ``write_beside`` is
    called on rank 0 with the directory, to add the adapter's config and the tokenizer.
    """
    group = engine.communicator
    tensors: dict[str, Tensor] = {}
    for unit in engine.units:
        masters = gather_masters(engine, unit)
        if group.rank == 0:
            for name, master in masters.items():
                # Copies: safetensors refuses tensors that share memory.
                tensors |= {key: master.detach().to("cpu", copy=True) for key in stored_keys[name]}
    with all_or_none(group, "export"):
        if group.rank == 0:
            _write(path, tensors, write_beside)
    return Exported(path, sum(tensor.nbytes for tensor in tensors.values())) if group.rank == 0 else None


def _write(path: Path, tensors: dict[str, Tensor], write_beside: Callable[[Path], None]) -> None:
    aside = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    save_file(tensors, aside / FILE, metadata={"format": "pt"})
    (aside / FILE).chmod(READABLE)
    write_beside(aside)
    durable.sync_tree(aside)
    shutil.rmtree(path, ignore_errors=True)
    aside.rename(path)
    durable.sync(path.parent)
