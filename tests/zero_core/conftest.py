from collections.abc import Iterator

import pytest
import torch

from tests.zero_core.ranks import RankPool
from zero_core.memory.arena import Arena
from zero_core.memory.ledger import Ledger

# As many as a rank of the pools has: in which order a kernel adds up depends on it.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, RankPool]]:
    """A pool for each number of ranks; one starts when it is first used."""
    pools = {world_size: RankPool(world_size) for world_size in (1, 2, 3, 4)}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


@pytest.fixture
def arena(ledger: Ledger) -> Arena:
    return Arena(torch.device("cpu"), ledger)
