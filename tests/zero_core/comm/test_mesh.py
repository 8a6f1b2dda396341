import pytest

from zero_core.comm.mesh import Mesh


def test_rows_columns_and_nodes_cut_the_world() -> None:
    mesh = Mesh(rank=6, world_size=8, shard_size=4, node_size=2, secondary_size=2)
    assert mesh.rows() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert mesh.columns() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert mesh.neighbours(2) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.across_nodes() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert mesh.replica == 1


@pytest.mark.parametrize(
    ("world_size", "shard_size", "secondary_size", "message"),
    [(6, 4, 1, "shard_size: 4 does not divide the 6 ranks"), (8, 4, 3, "secondary_shard_size: 3 does not")],
)
def test_a_mesh_that_does_not_come_out_even_is_refused(
    world_size: int, shard_size: int, secondary_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Mesh(0, world_size, shard_size, 1, secondary_size)
