import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_model import write_tiny_model
from zero_core.models.model_files import InvalidModel, check_model_dir, files_beside


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model", hidden=16, layers=1)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def index(model: Path, content: dict[str, Any]) -> None:
    """Put an index in the place of the single file of weights."""
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps(content))


def write_header(path: Path, header: dict[str, Any], data: bytes = b"") -> None:
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)


def test_it_loads_no_torch() -> None:
    code = (
        "import sys, zero_core.models.model_files; "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("tie", [True, False])
def test_size_is_read_from_the_headers(tmp_path: Path, tie: bool) -> None:
    from transformers import AutoModelForCausalLM

    path = write_tiny_model(tmp_path / "model", tie=tie)
    files = check_model_dir(path)
    assert files.parameters == AutoModelForCausalLM.from_pretrained(path).num_parameters()
    assert (files.architecture, files.model_type) == ("LlamaForCausalLM", "llama")
    assert files.bytes == (path / "model.safetensors").stat().st_size


def test_sharded_weights(model: Path) -> None:
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(model)
    whole.save_pretrained(model, max_shard_size="5KB")
    (model / "model.safetensors").unlink()
    assert check_model_dir(model).parameters == whole.num_parameters()
    shard = sorted(model.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(InvalidModel, match=f"{shard.name} is missing"):
        check_model_dir(model)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "x.ckpt", "x.pkl"])
def test_pickled_weights_are_refused(model: Path, name: str) -> None:
    (model / name).write_bytes(b"")
    with pytest.raises(InvalidModel, match=f"{name} may hold pickled code"):
        check_model_dir(model)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
def test_code_of_the_models_own_is_refused(model: Path, name: str) -> None:
    edit(model / name, auto_map={"AutoModelForCausalLM": "own.Model"})
    with pytest.raises(InvalidModel, match=f"{name} has auto_map"):
        check_model_dir(model)


def test_a_header_of_a_gigabyte_is_not_read(model: Path) -> None:
    with (model / "model.safetensors").open("wb") as file:
        file.write((2**30).to_bytes(8, "little"))
        file.truncate(2**31)
    with pytest.raises(InvalidModel, match="header would be of 1,073,741,824 bytes"):
        check_model_dir(model)


def test_a_gap_between_tensors_is_refused(model: Path) -> None:
    tensors = {f"w{i}": {"dtype": "F32", "shape": [1], "data_offsets": [8 * i, 8 * i + 4]} for i in range(2)}
    write_header(model / "model.safetensors", tensors, bytes(8))
    with pytest.raises(InvalidModel, match="puts the tensor 'w1' at byte 8 of its data, not 4"):
        check_model_dir(model)


def test_a_link_that_leads_elsewhere_is_refused(model: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("{}")
    (model / "vocab.json").symlink_to(secret)
    with pytest.raises(InvalidModel, match=f"vocab.json is a link to {secret}"):
        check_model_dir(model)


def test_a_model_in_the_hubs_cache_is_links_to_its_blobs(model: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models--tiny"
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for file in model.iterdir():
        blob = repository / "blobs" / f"hash-of-{file.name}"
        file.rename(blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    assert "tokenizer.json" in [file.name for file in files_beside(snapshot)]
    check_model_dir(snapshot)


def test_a_file_that_is_cut_short_is_refused(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(InvalidModel, match="copy it again"):
        check_model_dir(model)


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (GOOD | {"shape": [-2]}, "-2 is no size"),
        (GOOD | {"shape": 2}, "wrongly"),
        (GOOD | {"shape": [4]}, "it needs 16"),
        (GOOD | {"dtype": "F3"}, "'F3'"),
        (GOOD | {"data_offsets": [0]}, "wrongly"),
        ({}, "'shape'"),
        (3, "wrongly"),
    ],
)
def test_a_wrong_header_is_refused(model: Path, tensor: Any, words: str) -> None:
    write_header(model / "model.safetensors", {"w": tensor}, bytes(8))
    with pytest.raises(InvalidModel, match=words):
        check_model_dir(model)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "config.json").unlink(), "config.json is missing"),
        (lambda path: (path / "config.json").write_text("{"), "is not JSON"),
        (lambda path: (path / "config.json").write_text("[]"), "is not a JSON object"),
        (lambda path: edit(path / "config.json", architectures=None), "names no architecture"),
        (lambda path: edit(path / "config.json", architectures=["BertModel"]), "is a BertModel"),
        (lambda path: (path / "tokenizer.json").unlink(), "no tokenizer.json"),
        (lambda path: (path / "model.safetensors").unlink(), "neither model.safetensors"),
        (lambda path: (path / "model.safetensors").write_bytes(b"abc"), "not a safetensors file"),
        (
            lambda path: index(path, {"weight_map": {"w": "../x.safetensors"}}),
            "no safetensors file beside it",
        ),
        (lambda path: index(path, {"weight_map": {"w": "x.bin"}}), "no safetensors file beside it"),
        (lambda path: index(path, {}), "no weight_map"),
    ],
)
def test_a_damaged_directory_is_refused(model: Path, damage: Callable[[Path], Any], words: str) -> None:
    damage(model)
    with pytest.raises(InvalidModel, match=words):
        check_model_dir(model)


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="is not a directory"):
        check_model_dir(tmp_path / "none")
