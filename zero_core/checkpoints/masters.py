"""Master weights, whole: what training has, before it is rounded to the dtype of compute."""

import torch
from torch import Tensor

from zero_core.engine import ZeroEngine
from zero_core.sharding.unit import Unit


def gather_masters(engine: ZeroEngine, unit: Unit) -> dict[str, Tensor]:
    """The unit's trained parameters by name, in fp32, whole on every rank. Collective."""
    group = engine.communicator
    masters: dict[str, Tensor] = {}
    for flat in unit.trainable_flats:
        assert flat.master is not None
        whole = flat.master.resident
        if whole is None or flat.policy.placement.optimizer:
            loan = flat.master.borrow(0, flat.master.numel)
            mine = loan.wait().to(engine.device)
            whole = torch.empty(flat.layout.size, dtype=torch.float32, device=engine.device)
            if flat.policy.placement.optimizer:
                group.gather_shards(group.gathering, whole, mine).wait()
            else:
                whole.copy_(mine)
            loan.give_back(changed=False)
        masters |= {slot.name: whole[slot.offset : slot.end].view(slot.shape) for slot in flat.layout.slots}
    return masters
