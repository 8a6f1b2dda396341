import pytest
import torch

from bench.models import SHAPES, blocks, build_model


@pytest.mark.parametrize("name", SHAPES)
def test_the_elements_of_a_shape_are_those_of_its_model(name: str) -> None:
    shape = SHAPES[name]
    with torch.device("meta"):
        model = build_model(shape, sequence_length=64)
    total = sum(p.numel() for p in model.parameters())
    in_blocks = [sum(p.numel() for p in block.parameters()) for block in blocks(model)]
    assert len(in_blocks) == shape.layers
    assert total == shape.elements
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    assert max(*in_blocks, *(table.weight.numel() for table in tables)) == shape.largest_unit


def test_the_base_model_has_the_size_that_targets_speak_of() -> None:
    assert SHAPES["base"].elements == pytest.approx(187.7e6, rel=1e-3)
    assert SHAPES["1.5B"].elements == pytest.approx(1.5e9, rel=0.1)
    assert SHAPES["7B"].elements == pytest.approx(7e9, rel=0.1)


def test_every_build_has_the_same_weights() -> None:
    first, second = (build_model(SHAPES["tiny"], 64).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
