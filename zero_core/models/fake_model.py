"""A model whose tensors have shapes, dtypes and a device, and no memory: it runs, and computes nothing."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from zero_core.sharding.buffers import normalizations


class _AnyDtype(TorchDispatchMode):
    """CPU kernels take what their shape functions were not told of."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.ops.aten._grouped_mm.default or args[0].dtype == torch.bfloat16:
            return func(*args, **(kwargs or {}))
        result = func(args[0].bfloat16(), args[1].bfloat16(), *args[2:], **(kwargs or {}))
        return torch.empty_strided(result.shape, result.stride(), dtype=args[0].dtype, device=result.device)


@contextmanager
def fake_copy(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> Iterator[PreTrainedModel]:
    """A copy of ``model``, which may be on the meta device, for inside the block: there all tensors that are
    made are fake. Parameters are in ``dtype``, and buffers as the engine has them."""
    copied = copy.deepcopy(model)
    changed = {id(b) for layer in normalizations(copied) for b in layer.buffers() if b.is_floating_point()}
    with FakeTensorMode(), _AnyDtype():
        fakes: dict[int, nn.Parameter] = {}
        for module in copied.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                if id(parameter) not in fakes:
                    kept = dtype if parameter.is_floating_point() else parameter.dtype
                    values = torch.empty(parameter.shape, dtype=kept, device=device)
                    fakes[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                setattr(module, name, fakes[id(parameter)])
            for name, buffer in module.named_buffers(recurse=False):
                kept = dtype if id(buffer) in changed else buffer.dtype
                setattr(module, name, torch.empty(buffer.shape, dtype=kept, device=device))
        yield copied
