import math

import pytest
import torch
from torch import Tensor

from zero_core.comm.quantization import BlockQuantizer

BITS = (4, 8)
SIZES = (1, 2, 5, 255, 256, 257, 1000, 4096)


def round_trip(quantizer: BlockQuantizer, values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    packed = torch.empty(quantizer.packed_bytes(values.numel()), dtype=torch.uint8)
    quantizer.quantize(values, packed)
    out = torch.full((values.numel(),), math.nan, dtype=dtype)
    quantizer.dequantize(packed, out)
    return out


def by_block(values: Tensor, block_size: int) -> list[Tensor]:
    return list(values.double().split(block_size))


def half_steps(values: Tensor, quantizer: BlockQuantizer) -> Tensor:
    """By its definition, in fp64: the codes cut [-largest, largest] into 2 (2^(bits - 1) - 1) steps."""
    steps = 2 * (2 ** (quantizer.bits - 1) - 1)
    return torch.stack([block.abs().max() / steps for block in by_block(values, quantizer.block_size)])


def draw(kind: str, numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(numel)
    normal = torch.randn(numel, generator=generator)
    if kind == "normal":
        return normal
    if kind == "heavy-tailed":
        return normal / torch.rand(numel, generator=generator).clamp_min(1e-6) ** 2
    if kind == "far from zero":
        return normal + 1000
    if kind == "tiny":
        return normal * 1e-30
    assert kind == "large"
    return normal * 1e36


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", ["normal", "heavy-tailed", "far from zero", "tiny", "large"])
@pytest.mark.parametrize("numel", SIZES)
def test_every_element_is_within_half_a_step(bits: int, kind: str, numel: int) -> None:
    quantizer = BlockQuantizer(bits, block_size=64)
    values = draw(kind, numel)
    bounds = quantizer.error_bound(values).double()
    torch.testing.assert_close(bounds, half_steps(values, quantizer), rtol=1e-4, atol=0)
    errors = (round_trip(quantizer, values).double() - values.double()).abs()
    worst = torch.stack([block.max() for block in by_block(errors, 64)])
    assert (worst <= bounds).all()
    if kind == "normal" and numel >= 4096:
        assert (worst > 0.9 * bounds).any()  # no coarser than it says, and no finer


@pytest.mark.parametrize("bits", BITS)
def test_the_bound_counts_the_roundings_of_fp32(bits: int) -> None:
    """Between two codes the error is half a step exactly, so that any rounding goes beyond it."""
    quantizer = BlockQuantizer(bits, block_size=2**bits)
    largest = torch.rand(200, generator=torch.Generator().manual_seed(0)) + 0.5
    between = torch.arange(2 ** (bits - 1) - 1) + 0.5
    beyond = 0
    for value in largest.tolist():
        step = value / (2 ** (bits - 1) - 1)
        values = torch.cat([torch.tensor([value]), (between * step).float()])
        worst = (round_trip(quantizer, values).double() - values.double()).abs().max()
        assert worst <= quantizer.error_bound(values)[0].double()
        beyond += int(worst > half_steps(values, quantizer)[0])
    assert beyond > 0


@pytest.mark.parametrize("bits", BITS)
def test_what_fp32_can_hardly_hold_stays_within_the_bound(bits: int) -> None:
    quantizer = BlockQuantizer(bits)
    for largest in (1e-36, 1e-38, 1e-41, 1e-45):
        values = draw("normal", 1000)
        values = values / values.abs().max() * largest
        errors = (round_trip(quantizer, values).double() - values.double()).abs()
        assert errors.max() <= quantizer.error_bound(values).max()
        assert quantizer.error_bound(values).max() < max(largest, 2**-126)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_on_the_steps_come_back_exactly(bits: int, numel: int, dtype: torch.dtype) -> None:
    largest = 2 ** (bits - 1) - 1
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-largest, largest + 1, (numel,), generator=generator)
    codes[::128] = largest  # Each block has its largest code, so that its step is the power of two below.
    values = (codes * 2.0**-9).to(dtype)
    assert torch.equal(round_trip(BlockQuantizer(bits, block_size=128), values, dtype), values)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_lower_dtype_is_read_exactly_and_written_with_one_rounding(bits: int, dtype: torch.dtype) -> None:
    quantizer = BlockQuantizer(bits)
    values = draw("normal", 1000).to(dtype)
    wide = round_trip(quantizer, values.float())
    assert torch.equal(round_trip(quantizer, values), wide)
    assert torch.equal(round_trip(quantizer, values, dtype), wide.to(dtype))


@pytest.mark.parametrize("bits", BITS)
def test_a_block_of_zeros_is_exact_beside_others(bits: int) -> None:
    values = draw("normal", 1000)
    values[256:512] = 0
    assert torch.equal(round_trip(BlockQuantizer(bits), values)[256:512], torch.zeros(256))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("position", [0, 200, 511, 999])
def test_a_non_finite_value_makes_its_block_non_finite_and_no_other(
    bits: int, bad: float, position: int
) -> None:
    quantizer = BlockQuantizer(bits)
    values = draw("normal", 1000)
    clean = round_trip(quantizer, values)
    values[position] = bad
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        out = round_trip(quantizer, values, dtype)
        block = torch.arange(1000) // 256 == position // 256
        assert not out[block].isfinite().any()
        assert torch.equal(out[~block], clean[~block].to(dtype))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("numel", "cut"), [(1000, 256), (2**21 + 1001, 256 * 500)])
def test_blocks_do_not_see_each_other_nor_how_many_there_are(bits: int, numel: int, cut: int) -> None:
    quantizer = BlockQuantizer(bits)
    values = draw("normal", numel)
    alone = [round_trip(quantizer, part) for part in values.split(cut)]
    assert torch.equal(round_trip(quantizer, values), torch.cat(alone))
    bounds = [quantizer.error_bound(part) for part in values.split(cut)]
    assert torch.equal(quantizer.error_bound(values), torch.cat(bounds))


@pytest.mark.parametrize(
    ("bits", "block_size", "numel", "expected"),
    [
        (8, 256, 256, 256 + 4),
        (8, 256, 257, 257 + 8),
        (8, 256, 1, 1 + 4),
        (4, 256, 256, 128 + 4),
        (4, 256, 257, 129 + 8),
        (4, 64, 10_000, 5_000 + 4 * 157),
    ],
)
def test_the_packed_form_is_the_codes_and_the_scales(
    bits: int, block_size: int, numel: int, expected: int
) -> None:
    assert BlockQuantizer(bits, block_size).packed_bytes(numel) == expected


def test_a_packed_form_may_start_at_any_byte() -> None:
    quantizer = BlockQuantizer(4)
    values = draw("normal", 999)
    buffer = torch.zeros(quantizer.packed_bytes(999) + 2, dtype=torch.uint8)
    quantizer.quantize(values, buffer[1:-1])
    out = torch.empty(999)
    quantizer.dequantize(buffer[1:-1], out)
    assert torch.equal(out, round_trip(quantizer, values))
    assert buffer[0] == buffer[-1] == 0


def test_a_wrong_width_or_block_is_refused() -> None:
    with pytest.raises(ValueError, match="bits: 2"):
        BlockQuantizer(2)
    for size in (0, -2, 7):
        with pytest.raises(ValueError, match=f"block_size: {size}"):
            BlockQuantizer(8, size)
