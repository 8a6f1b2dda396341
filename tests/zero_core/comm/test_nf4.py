"""NF4 against bitsandbytes: the same codes, the same scales, the same values."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from bitsandbytes.functional import QuantState, dequantize_4bit, quantize_4bit
from torch import Tensor

from zero_core.comm.nf4 import VALUES, NormalFloat4

BLOCK = 64
NF4 = NormalFloat4()


def packed_of(values: Tensor) -> Tensor:
    packed = torch.full((NF4.packed_bytes(values.numel()),), 255, dtype=torch.uint8)
    NF4.quantize(values, packed)
    return packed


def unpacked(packed: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    out = torch.full((numel,), math.nan, dtype=dtype)
    NF4.dequantize(packed, out)
    return out


def theirs(values: Tensor) -> tuple[Tensor, QuantState]:
    return quantize_4bit(values, blocksize=BLOCK, quant_type="nf4", compress_statistics=False)


def normal(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel))


def zeros_between(numel: int) -> Tensor:
    values = normal(numel)
    values.view(-1, BLOCK)[::3] = 0
    return values


def every_code_and_every_bound(numel: int) -> Tensor:
    """Times a largest magnitude of 1: the values themselves, the points half way, and their neighbours."""
    codes = torch.tensor(VALUES)
    between = (codes[1:] + codes[:-1]) / 2
    above, below = (torch.nextafter(between, torch.tensor(side)) for side in (2.0, -2.0))
    values = torch.cat([codes, between, above, below])
    return torch.cat([values, torch.zeros(BLOCK - values.numel() % BLOCK)]).repeat(-(-numel // BLOCK))[:numel]


def one_of_each(numel: int) -> Tensor:
    return torch.where(torch.arange(numel) % BLOCK == 5, -3.0, 0.0)


DRAWN: dict[str, Callable[[int], Tensor]] = {
    "normal": normal,
    "uniform": lambda numel: torch.rand(numel, generator=torch.Generator().manual_seed(1)) * 2 - 1,
    "heavy-tailed": lambda numel: normal(numel) / normal(numel + 1)[1:].abs().clamp_min(1e-6),
    "tiny": lambda numel: normal(numel) * 1e-30,
    "subnormal": lambda numel: normal(numel) * 1e-40,
    "huge": lambda numel: normal(numel).clamp(-3, 3) * 1e38,
    "zeros": torch.zeros,
    "zeros between": zeros_between,
    "bounds": every_code_and_every_bound,
    "negative alone": one_of_each,
}


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", DRAWN)
def test_codes_scales_and_values_are_those_of_bitsandbytes(kind: str, stored: torch.dtype) -> None:
    values = DRAWN[kind](128 * BLOCK).to(stored)
    if not values.isfinite().all():
        values = values.nan_to_num(0)
    packed = packed_of(values)
    codes, state = theirs(values)
    assert torch.equal(packed[: codes.numel()], codes.view(-1))
    assert torch.equal(packed[codes.numel() :].view(torch.float32), state.absmax)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        state.dtype = dtype
        assert torch.equal(unpacked(packed, values.numel(), dtype), dequantize_4bit(codes, state).view(-1))


def test_all_sixteen_codes_come_back_as_the_papers_values() -> None:
    values = torch.tensor(VALUES).repeat(BLOCK // 16) * 2.5
    assert torch.equal(unpacked(packed_of(values), BLOCK, torch.float32), values)
    assert len(set(packed_of(values)[: BLOCK // 2].tolist())) == 8


def test_no_element_is_further_off_than_half_the_widest_gap() -> None:
    values = normal(BLOCK * 1000)
    errors = (unpacked(packed_of(values), values.numel(), torch.float32) - values).view(-1, BLOCK).abs()
    gap = max(high - low for low, high in itertools.pairwise(VALUES))
    largest = values.view(-1, BLOCK).abs().amax(1, keepdim=True)
    assert (errors <= 0.5001 * gap * largest).all()
    assert (errors > 0.45 * gap * largest).any()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("position", [0, 70, 127])
def test_a_non_finite_value_makes_its_block_non_finite_and_no_other(bad: float, position: int) -> None:
    values = normal(3 * BLOCK)
    clean = unpacked(packed_of(values), values.numel(), torch.float32)
    values[position] = bad
    out = unpacked(packed_of(values), values.numel(), torch.float32)
    block = torch.arange(values.numel()) // BLOCK == position // BLOCK
    assert not out[block].isfinite().any()
    assert torch.equal(out[~block], clean[~block])


def test_an_element_takes_half_a_byte_and_a_block_four_more() -> None:
    assert NF4.packed_bytes(10 * BLOCK) == 5 * BLOCK + 4 * 10
