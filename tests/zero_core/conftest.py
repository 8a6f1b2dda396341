from collections.abc import Iterator

import pytest

from tests.zero_core.ranks import RankPool


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, RankPool]]:
    """A pool for each number of ranks; one starts when it is first used."""
    pools = {world_size: RankPool(world_size) for world_size in (1, 2, 3, 4)}
    yield pools
    for pool in pools.values():
        pool.close()
