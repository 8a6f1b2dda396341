import json
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.tiny_model import write_tiny_model
from zero_core.checkpoints.tensor_file import Run
from zero_core.models.loading import open_model
from zero_core.models.model_files import InvalidModel, stored_tensors
from zero_core.models.slices import SliceMap
from zero_core.models.weights import WeightFiles


def write_model(path: Path, *, tie: bool = True, sharded: bool = False) -> Path:
    write_tiny_model(path, tie=tie)
    if sharded:
        model = AutoModelForCausalLM.from_pretrained(path)
        (path / "model.safetensors").unlink()
        model.save_pretrained(path, max_shard_size="40KB")
        assert len(list(path.glob("*.safetensors"))) > 3
    return path


def stored(path: Path) -> dict[str, Tensor]:
    """The reference: every file read whole by safetensors itself."""
    return {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}


def rewrite(path: Path, weights: dict[str, Tensor]) -> None:
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def open_files(path: Path) -> WeightFiles:
    """Every stored tensor under its own key."""
    tensors = stored_tensors(path)
    return WeightFiles(tensors, {key: [SliceMap.whole(key, tensors[key].numel)] for key in tensors}, {})


@pytest.mark.parametrize("sharded", [False, True])
def test_any_range_of_any_parameter_is_what_the_file_holds(tmp_path: Path, sharded: bool) -> None:
    path = write_model(tmp_path / "model", sharded=sharded)
    weights = stored(path)
    files = open_files(path)
    expected_bytes = 0
    for name, value in weights.items():
        flat = value.reshape(-1)
        numel = flat.numel()
        for start, length in [(0, numel), (0, 1), (numel - 1, 1), (numel // 3, numel // 2), (31, 1)]:
            part = files.read(name, start, length)
            assert torch.equal(part, flat[start : start + length])
            expected_bytes += 4 * length
    assert files.bytes_read == expected_bytes


def test_a_shard_takes_about_its_own_memory_and_not_the_files(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    rows = 2**16
    rewrite(path, {"large": torch.arange(rows * 256, dtype=torch.float32).view(rows, 256)})
    shard = rows * 256 // 64
    process = psutil.Process()
    before = process.memory_info().rss
    files = open_files(path)
    part = files.read("large", 5 * shard, shard)
    grown = process.memory_info().rss - before
    assert part[0] == 5 * shard
    assert part.untyped_storage().nbytes() == files.bytes_read == 4 * shard
    assert grown < 16 * 2**20  # of 64 MiB


def test_dtypes_and_shapes_of_every_kind_are_read_as_stored(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    weights = {
        "scalar": torch.tensor(3.5),
        "vector": torch.randn(7, dtype=torch.float16),
        "cube": torch.randn(3, 5, 4).bfloat16(),
        "count": torch.arange(6).view(2, 3),
    }
    rewrite(path, weights)
    files = open_files(path)
    for name, value in weights.items():
        whole = files.read(name, 0, value.numel())
        assert whole.dtype == value.dtype
        assert torch.equal(whole, value.reshape(-1))
    assert torch.equal(files.read("cube", 19, 22), weights["cube"].reshape(-1)[19:41])


def test_what_was_read_can_be_changed_without_the_file(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    files = open_files(path)
    files.read("model.norm.weight", 0, 32).zero_()
    assert files.read("model.norm.weight", 0, 32).all()
    assert stored(path)["model.norm.weight"].all()


def test_a_tied_parameter_is_found_under_its_other_name(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    weights = stored(path)
    assert "lm_head.weight" not in weights
    embedding = weights.pop("model.embed_tokens.weight")
    rewrite(path, weights | {"lm_head.weight": embedding})
    opened = open_model(path, torch.float32)
    assert opened.model.lm_head.weight is opened.model.model.embed_tokens.weight
    values = opened.weights.read("model.embed_tokens.weight", 0, embedding.numel())
    assert torch.equal(values, embedding.reshape(-1))


@pytest.mark.parametrize("differ", [False, True])
def test_what_is_stored_with_two_values_is_not_tied(tmp_path: Path, differ: bool) -> None:
    path = write_model(tmp_path / "model")
    weights = stored(path)
    rewrite(path, weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + differ})
    model = open_model(path, torch.float32).model
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is not differ


def test_the_base_models_prefix_may_be_left_out(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    weights = stored(path)
    rewrite(path, {name.removeprefix("model."): value for name, value in weights.items()})
    files = open_model(path, torch.float32).weights
    norm = weights["model.norm.weight"]
    assert torch.equal(files.read("model.norm.weight", 1, 2), norm[1:3])
    assert list(files.runs("model.norm.weight")) == [(0, Run("norm.weight", 0, 32))]


@pytest.mark.parametrize("differ", [False, True])
def test_one_parameter_under_two_keys_must_have_one_value(tmp_path: Path, differ: bool) -> None:
    path = write_model(tmp_path / "model")
    weights = stored(path)
    rewrite(path, weights | {"norm.weight": weights["model.norm.weight"] + differ})
    if differ:
        with pytest.raises(InvalidModel, match=r"stored with several values: model\.norm\.weight"):
            open_model(path, torch.float32)
    else:
        keys = {run.key for _, run in open_model(path, torch.float32).weights.runs("model.norm.weight")}
        assert keys == {"model.norm.weight", "norm.weight"}


def test_parts_of_several_dtypes_are_read_as_what_holds_them_all(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    rewrite(path, {"a": torch.arange(4).bfloat16(), "b": torch.arange(4, 8.0)})
    parts = SliceMap([Run("a", 2, 2), Run("b", 0, 3)])
    files = WeightFiles(stored_tensors(path), {"both": [parts]}, {})
    assert files.stored_dtype("both") == torch.float32
    assert torch.equal(files.read("both", 1, 3), torch.tensor([3.0, 4.0, 5.0]))


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidModel, match="holds quantized weights"):
        open_model(path, torch.float32)
