import pytest
import torch
from torch import Tensor

from zero_core.comm.nf4 import NormalFloat4
from zero_core.comm.quantization import BlockQuantizer
from zero_core.planner.formulas import STORED_BYTES
from zero_core.sharding.encoding import (
    BLOCK,
    QUANTIZERS,
    SEGMENT,
    Encoding,
    KeptAs,
    decode,
    encode,
    kept_as_stored,
)

CPU = torch.device("cpu")
ENCODINGS: list[Encoding] = [*QUANTIZERS.values(), KeptAs(torch.bfloat16), KeptAs(torch.float8_e5m2)]


def drawn(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel))


def round_trip(encoding: Encoding, values: Tensor) -> Tensor:
    packed = encode(encoding, lambda begin, end: values[begin:end], values.numel(), CPU)
    out = torch.full_like(values, torch.nan)
    decode(encoding, packed, out)
    return out


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_values_do_not_depend_on_where_a_buffer_was_cut(encoding: Encoding) -> None:
    values = drawn(2 * SEGMENT + 7 * BLOCK)
    at_once = torch.empty_like(values)
    packed = torch.empty(encoding.packed_bytes(values.numel()), dtype=torch.uint8)
    encoding.quantize(values, packed)
    encoding.dequantize(packed, at_once)
    for cut in (BLOCK, SEGMENT - BLOCK, SEGMENT, SEGMENT + 5 * BLOCK):
        parts = [round_trip(encoding, values[:cut]), round_trip(encoding, values[cut:])]
        assert torch.equal(torch.cat(parts), at_once)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_no_more_than_a_segment_is_asked_for_at_once(encoding: Encoding) -> None:
    asked = []

    def values(begin: int, end: int) -> Tensor:
        asked.append((begin, end))
        return torch.zeros(end - begin)

    packed = encode(encoding, values, SEGMENT + BLOCK, CPU)
    assert asked == [(0, SEGMENT), (SEGMENT, SEGMENT + BLOCK)]
    assert packed.numel() == encoding.packed_bytes(SEGMENT + BLOCK)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_narrower_dtype_comes_back_exactly(stored: torch.dtype) -> None:
    values = drawn(1000).to(stored)
    kept = kept_as_stored(stored, torch.float32)
    assert kept == KeptAs(stored)
    assert kept.packed_bytes(1000) == values.nbytes
    assert torch.equal(round_trip(kept, values.float()), values.float())


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_no_narrower_is_kept_in_the_dtype_of_compute(stored: torch.dtype) -> None:
    assert kept_as_stored(stored, torch.bfloat16) is None


def test_int8_is_within_half_a_step_of_its_block() -> None:
    values = drawn(100 * BLOCK) * torch.logspace(-6, 6, 100).repeat_interleave(BLOCK)
    errors = (round_trip(QUANTIZERS["int8"], values) - values).view(-1, BLOCK).abs().amax(1)
    half_steps = values.view(-1, BLOCK).abs().amax(1) / 254
    assert (errors <= 1.00001 * half_steps).all()
    assert (errors > 0.9 * half_steps).any()


def test_the_planner_counts_the_bytes_of_every_encoding() -> None:
    assert {"nf4": NormalFloat4(64), "int8": BlockQuantizer(8, 64)} == QUANTIZERS
    for name, quantizer in QUANTIZERS.items():
        assert quantizer.packed_bytes(640) == STORED_BYTES[name] * 640
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        assert dtype.itemsize == STORED_BYTES[name]
