import json
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from tests.tiny_model import byte_tokenizer, write_tiny_model
from zero_core.models.loading import load_model
from zero_core.models.model_files import InvalidModel
from zero_core.models.weights import WeightFiles, empty_model, open_weights


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


def shapes(weights: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in weights.items()}


def fill(model: PreTrainedModel, files: WeightFiles) -> None:
    for name, parameter in list(model.named_parameters()):
        values = files.read(name, 0, parameter.numel()).view(parameter.shape).to(parameter.dtype)
        torch.utils.swap_tensors(parameter, nn.Parameter(values))


@pytest.mark.parametrize("sharded", [False, True])
def test_any_range_of_any_parameter_is_what_the_file_holds(tmp_path: Path, sharded: bool) -> None:
    path = write_model(tmp_path / "model", sharded=sharded)
    weights = stored(path)
    files = WeightFiles.open(path, shapes(weights))
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
    files = WeightFiles.open(path, {"large": (rows, 256)})
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
    files = WeightFiles.open(path, shapes(weights))
    for name, value in weights.items():
        whole = files.read(name, 0, value.numel())
        assert whole.dtype == value.dtype
        assert torch.equal(whole, value.reshape(-1))
    assert torch.equal(files.read("cube", 19, 22), weights["cube"].reshape(-1)[19:41])


def test_what_was_read_can_be_changed_without_the_file(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    files = WeightFiles.open(path, {"model.norm.weight": (32,)})
    files.read("model.norm.weight", 0, 32).zero_()
    assert files.read("model.norm.weight", 0, 32).all()
    assert stored(path)["model.norm.weight"].all()


def test_a_tied_parameter_is_found_under_its_other_name(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    weights = stored(path)
    assert "lm_head.weight" not in weights
    embedding = weights.pop("model.embed_tokens.weight")
    rewrite(path, weights | {"lm_head.weight": embedding})
    files = open_weights(path, empty_model(path, torch.float32))
    assert torch.equal(files.read("model.embed_tokens.weight", 0, embedding.numel()), embedding.reshape(-1))


def test_names_of_a_tied_parameter_must_agree_on_its_values(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    weights = stored(path)
    embedding = weights["model.embed_tokens.weight"]
    rewrite(path, weights | {"lm_head.weight": embedding.clone()})
    model = empty_model(path, torch.float32)
    open_weights(path, model)
    rewrite(path, weights | {"lm_head.weight": embedding + 1})
    with pytest.raises(InvalidModel, match=r"tied, but stored with several values: model\.embed_tokens"):
        open_weights(path, model)


@pytest.mark.parametrize("stored_with_prefix", [True, False])
def test_the_base_models_prefix_may_be_added_or_left_out(tmp_path: Path, stored_with_prefix: bool) -> None:
    path = write_model(tmp_path / "model")
    rewrite(path, {"model.norm.weight" if stored_with_prefix else "norm.weight": torch.arange(4.0)})
    asked = "norm.weight" if stored_with_prefix else "model.norm.weight"
    files = WeightFiles.open(path, {asked: (4,)}, base_model_prefix="model")
    assert torch.equal(files.read(asked, 1, 2), torch.tensor([1.0, 2.0]))
    with pytest.raises(InvalidModel, match="missing"):
        WeightFiles.open(path, {asked: (4,)})


def test_a_parameter_is_not_taken_for_another_with_the_prefix(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    rewrite(path, {"model.norm.weight": torch.zeros(4)})
    with pytest.raises(InvalidModel, match=r"missing: norm\.weight\)"):
        WeightFiles.open(path, {"model.norm.weight": (4,), "norm.weight": (4,)}, base_model_prefix="model")


def test_missing_weights_and_other_shapes_are_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    names = {f"more.{i}": (2,) for i in range(5)}
    with pytest.raises(InvalidModel, match=r"missing: more\.0, more\.1, more\.2 and 2 more\)"):
        WeightFiles.open(path, names)
    with pytest.raises(InvalidModel, match=r"mismatched: model\.norm\.weight\)"):
        WeightFiles.open(path, {"model.norm.weight": (16,)})


def test_a_file_that_safetensors_refuses_is_named(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    header = {
        "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "b": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]},
    }
    content = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(content).to_bytes(8, "little") + content + bytes(8))
    with pytest.raises(InvalidModel, match=r"model\.safetensors can't be read"):
        WeightFiles.open(path, {"a": (1,)})


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharded", [False, True])
def test_an_empty_model_filled_from_the_files_is_the_loaded_one(
    tmp_path: Path, tie: bool, dtype: torch.dtype, sharded: bool
) -> None:
    path = write_model(tmp_path / "model", tie=tie, sharded=sharded)
    loaded, _ = load_model(path, dtype)
    model = empty_model(path, dtype)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in loaded.named_parameters()]
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie
    fill(model, open_weights(path, model))
    for (name, ours), (_, theirs) in zip(model.named_buffers(), loaded.named_buffers(), strict=True):
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours, theirs), name
    ids = torch.arange(100)[None]
    assert torch.equal(model(input_ids=ids).logits, loaded(input_ids=ids).logits)


def test_an_empty_model_is_configured_as_a_loaded_one(tmp_path: Path) -> None:
    config = GPT2Config(
        vocab_size=258, n_positions=32, n_embd=16, n_layer=1, n_head=2,
        resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    saved = GPT2LMHeadModel(config)
    saved.generation_config.eos_token_id = [1, 7]
    saved.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    loaded, _ = load_model(tmp_path, torch.float32)
    model = empty_model(tmp_path, torch.float32)
    assert model.config.to_dict() == loaded.config.to_dict()
    assert model.config._attn_implementation == "sdpa"
    assert model.generation_config.to_dict() == loaded.generation_config.to_dict()
    fill(model, open_weights(tmp_path, model))
    ids = torch.arange(8)[None]
    assert torch.equal(model.train()(input_ids=ids).logits, loaded(input_ids=ids).logits)


def test_weights_that_loading_would_convert_are_refused(tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=258, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(InvalidModel, match=r"in slices: transformers makes .* from the stored .*experts"):
        empty_model(tmp_path, torch.float32)


def test_weights_that_loading_would_rename_are_refused(tmp_path: Path) -> None:
    config = GPTNeoXConfig(
        vocab_size=258, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(InvalidModel, match=r"makes lm_head\.weight from the stored embed_out\.weight"):
        empty_model(tmp_path, torch.float32)


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InvalidModel, match="holds quantized weights"):
        empty_model(path, torch.float32)


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "none-such"}))
    with pytest.raises(InvalidModel, match="can't be loaded"):
        empty_model(path, torch.float32)
