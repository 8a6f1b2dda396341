"""What comes out is what went in, trained: the same keys and dtypes, the engine's own logits."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.zero_core.architectures import write_architecture
from tests.zero_core.ranks import RankError, RankPool
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine
from zero_core.checkpoints import export as export_module
from zero_core.checkpoints.export import Parameters, export
from zero_core.checkpoints.tensor_file import TensorFile
from zero_core.config.zero import Precision
from zero_core.models.loading import open_model

IDS = torch.arange(2, 34).view(2, 16)


def note(directory: Path) -> None:
    (directory / "beside.json").write_text("{}")


def train_and_export(
    base: Path, target: Path, stage: int, precision: Precision = "fp32"
) -> tuple[Tensor, int]:
    """Logits after one step, and the bytes that were read to start."""
    opened = open_model(base, torch.float32)
    config = ZeroConfig(stage=stage, precision=precision)
    engine = ZeroEngine(opened.model, config, AdamWConfig(lr=1e-2), weights=opened.weights)
    read = opened.weights.bytes_read
    engine.backward(engine(input_ids=IDS, labels=IDS, use_cache=False).loss)
    engine.step()
    with engine.full_parameters() as model, torch.no_grad():
        logits = model.eval()(input_ids=IDS, use_cache=False).logits
    exported = export(engine, target, opened.weights, note, Parameters())
    assert (exported is not None) == (engine.communicator.rank == 0)
    engine.close()
    return logits, read


def stored(path: Path) -> dict[str, Tensor]:
    return {key: value for file in path.glob("*.safetensors") for key, value in load_file(file).items()}


def reloaded_logits(path: Path, **options: Any) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, **options).eval()
    logits: Tensor = model(input_ids=IDS, use_cache=False).logits
    return logits.detach()


@pytest.mark.parametrize(
    "name",
    [
        "llama-tied",
        "gpt2",
        "gpt-neox",
        "mixtral",
        "qwen3-moe",
        "deepseek-v3",
        "gemma3-untied",
        "hrm",
        "inkling2",
    ],
)
def test_the_result_is_stored_as_its_base_and_is_the_trained_model(
    pools: dict[int, RankPool], tmp_path: Path, name: str
) -> None:
    base, target = write_architecture(tmp_path / "base", name), tmp_path / "result"
    (logits, _), _ = pools[2].run(train_and_export, base, target, 3)
    before, after = stored(base), stored(target)
    assert {key: (value.shape, value.dtype) for key, value in after.items()} == {
        key: (value.shape, value.dtype) for key, value in before.items()
    }
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert {key: load_file(target / file)[key].nbytes for key, file in index["weight_map"].items()} == {
        key: value.nbytes for key, value in before.items()
    }
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in before.values())
    # Without the index, and with the base's config.
    (target / "config.json").write_bytes((base / "config.json").read_bytes())
    assert torch.equal(reloaded_logits(target), logits)
    assert not torch.allclose(reloaded_logits(base), logits, atol=1e-3)


@pytest.mark.parametrize(("stage", "world_size"), [(0, 1), (2, 3)])
def test_at_any_stage_and_number_of_ranks(
    pools: dict[int, RankPool], tmp_path: Path, stage: int, world_size: int
) -> None:
    base, target = write_architecture(tmp_path / "base", "mixtral-tied"), tmp_path / "result"
    logits = pools[world_size].run(train_and_export, base, target, stage)[0][0]
    (target / "config.json").write_bytes((base / "config.json").read_bytes())
    assert torch.equal(reloaded_logits(target), logits)
    assert len(list(target.glob("*.safetensors"))) == world_size


def test_each_tensor_keeps_its_dtype_and_what_the_model_has_no_place_for_its_value(
    pools: dict[int, RankPool], tmp_path: Path
) -> None:
    base, target = write_architecture(tmp_path / "base", "llama", torch.bfloat16), tmp_path / "result"
    config = json.loads((base / "config.json").read_text())
    del config["dtype"]
    (base / "config.json").write_text(json.dumps(config))
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.randn(5).half(),
        "model.layers.2.mtp.weight": torch.randn(3, 7),
    }
    save_file(extra, base / "model-extra.safetensors")
    norm = "model.norm.weight"
    for file in base.glob("model-0*.safetensors"):
        tensors = load_file(file)
        if norm in tensors:
            save_file(tensors | {norm: tensors[norm].float()}, file)
    index = json.loads((base / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(extra, "model-extra.safetensors")
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    pools[2].run(train_and_export, base, target, 3, "bf16")
    before, after = stored(base), stored(target)
    assert {key: value.dtype for key, value in after.items()} == {k: v.dtype for k, v in before.items()}
    assert after[norm].dtype == torch.float32
    assert all(torch.equal(after[key], value) for key, value in extra.items())
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])


def test_whoever_may_read_the_directory_may_read_the_weights(
    pools: dict[int, RankPool], tmp_path: Path
) -> None:
    base, target = write_architecture(tmp_path / "base", "llama"), tmp_path / "result"
    pools[2].run(train_and_export, base, target, 1)
    umask = os.umask(0)
    os.umask(umask)
    modes = {file.name: file.stat().st_mode & 0o777 for file in target.iterdir()}
    assert len(modes) == 4
    assert set(modes.values()) == {0o666 & ~umask}


def full_disk(base: Path, target: Path, stage: int) -> None:
    """Rank 1's file takes no values."""

    class Full(TensorFile):
        def write(self, name: str, start: int, values: memoryview) -> None:
            raise OSError(28, "No space left on device")

    if torch.distributed.get_rank() == 1:
        vars(export_module)["TensorFile"] = Full
    train_and_export(base, target, stage)


def test_a_rank_that_can_not_write_ends_the_export_on_all(pools: dict[int, RankPool], tmp_path: Path) -> None:
    base, target = write_architecture(tmp_path / "base", "llama"), tmp_path / "result"
    with pytest.raises(RankError) as raised:
        pools[2].run(full_disk, base, target, 3)
    assert "No space left on device" in str(raised.value)
    assert "rank 1 failed; its log has the cause" in str(raised.value)
    assert not target.exists()
