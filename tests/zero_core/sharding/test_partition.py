import pytest
from torch import nn

from tests.zero_core.reference import build_model
from zero_core.sharding.partition import partition


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 2)


def names(model: nn.Module, unit_classes: tuple[str, ...] = ()) -> dict[str, list[str]]:
    return {part.name: [name for name, _ in part.parameters] for part in partition(model, unit_classes)}


def test_a_transformers_blocks_and_tables_are_its_units_and_the_rest_is_the_root() -> None:
    parts = names(build_model(tied=False))
    assert list(parts) == ["", "model.embed_tokens", "model.layers.0", "model.layers.1", "lm_head"]
    assert parts[""] == ["model.norm.weight"]
    assert parts["lm_head"] == ["lm_head.weight"]


def test_a_tied_parameter_is_held_once() -> None:
    model = build_model(tied=True)
    (table,) = [part for part in partition(model) if part.name == "model.embed_tokens"]
    assert [name for name, _ in table.parameters] == ["model.embed_tokens.weight"]
    assert table.modules == [model.get_input_embeddings(), model.get_output_embeddings()]
    assert "lm_head" not in names(model)


def test_without_declared_blocks_the_items_of_lists_are_units() -> None:
    assert list(names(Tower())) == ["blocks.0", "blocks.1", "head"]


def test_a_parameter_shared_by_two_units_belongs_to_the_root() -> None:
    model = Tower()
    model.blocks[1].linear.weight = model.blocks[0].linear.weight
    parts = names(model)
    assert "blocks.0.linear.weight" in parts[""]
    assert parts["blocks.0"] == ["blocks.0.linear.bias"]
    assert parts["blocks.1"] == ["blocks.1.linear.bias"]


def test_a_block_inside_a_block_goes_with_the_outer_one() -> None:
    outer = nn.ModuleList([Tower(), Tower()])
    assert list(names(nn.Sequential(outer))) == ["0.0", "0.1"]


def test_named_classes_are_obeyed_and_a_missing_one_is_an_error() -> None:
    assert list(names(Tower(), ("Linear",))) == ["blocks.0.linear", "blocks.1.linear", "head"]
    with pytest.raises(ValueError, match="unit_classes: the model has no module of class Attention"):
        names(Tower(), ("Attention",))


def test_every_parameter_is_in_one_unit() -> None:
    for model in (build_model(True), build_model(False), Tower()):
        held = [name for part in names(model).values() for name in part]
        assert sorted(held) == sorted(name for name, _ in model.named_parameters())


def linear_weights(model: nn.Module) -> dict[str, list[str]]:
    return {part.name: sorted(part.linear_weights) for part in partition(model) if part.linear_weights}


def test_weights_of_linear_layers_count_inside_the_blocks_alone() -> None:
    found = linear_weights(build_model(tied=False))
    assert list(found) == ["model.layers.0", "model.layers.1"]
    attention = [f"model.layers.0.self_attn.{name}_proj.weight" for name in "koqv"]
    feed_forward = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("down", "gate", "up")]
    assert found["model.layers.0"] == [*feed_forward, *attention]


def test_a_weight_that_something_else_reads_too_is_no_linear_layers() -> None:
    model = Tower()
    model.blocks[0].table = nn.Embedding(4, 4)
    model.blocks[0].table.weight = model.blocks[0].linear.weight
    assert linear_weights(model) == {"blocks.1": ["blocks.1.linear.weight"]}
