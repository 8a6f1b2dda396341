import pytest
import torch

from zero_core.sharding.norm import CHUNK, chunk_norms, square_sum


@pytest.mark.parametrize("numel", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 10_000_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_fp64_sum_however_large_the_buffer(numel: int, dtype: torch.dtype) -> None:
    buffer = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    exact = buffer.double().square().sum().item()
    assert square_sum(chunk_norms(buffer)) == pytest.approx(exact, rel=1e-6)


def test_shards_add_up_to_the_whole() -> None:
    buffer = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0))
    parts = sum(square_sum(chunk_norms(part)) for part in buffer.chunk(7))
    assert parts == pytest.approx(square_sum(chunk_norms(buffer)), rel=1e-7)
    together = [norms for part in buffer.chunk(7) for norms in chunk_norms(part)]
    assert square_sum(together) == pytest.approx(parts, rel=1e-12)
