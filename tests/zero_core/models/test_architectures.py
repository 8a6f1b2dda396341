"""Models as transformers loads them, bit for bit, from slices of what is stored."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.zero_core.architectures import ARCHITECTURES, write_architecture
from zero_core.models.loading import load_model, open_model
from zero_core.models.model_files import InvalidModel


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_model_is_the_one_that_transformers_loads(tmp_path: Path, name: str) -> None:
    path = write_architecture(tmp_path / "model", name)
    assert len(list(path.glob("*.safetensors"))) > 1
    for dtype in (torch.float32, torch.bfloat16):
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        ours, _ = load_model(path, dtype)
        for mine, reference in (
            (ours.named_parameters(), theirs.named_parameters()),
            (ours.named_buffers(), theirs.named_buffers()),
        ):
            for (key, value), (their_key, their_value) in zip(mine, reference, strict=True):
                assert (key, value.dtype) == (their_key, their_value.dtype)
                assert torch.equal(value, their_value), key
        ids = torch.arange(40)[None]
        logits = ours.eval()(input_ids=ids, use_cache=False).logits
        assert torch.equal(logits, theirs(input_ids=ids, use_cache=False).logits)


def test_any_range_of_a_fused_parameter_is_read(tmp_path: Path) -> None:
    path = write_architecture(tmp_path / "model", "mixtral")
    whole = dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
    weights = open_model(path, torch.float32).weights
    name = "model.layers.1.mlp.experts.gate_up_proj"
    flat = whole[name].reshape(-1)
    matrix = 48 * 32
    for start, length in [
        (0, flat.numel()),
        (matrix - 3, 5),
        (3 * matrix + 7, 2 * matrix),
        (flat.numel() - 1, 1),
    ]:
        assert torch.equal(weights.read(name, start, length), flat[start : start + length])
    assert weights.bytes_read == 4 * (flat.numel() + 5 + 2 * matrix + 1)


def test_a_missing_expert_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = write_architecture(tmp_path / "model", "mixtral")
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        gone = [key for key in tensors if "layers.1" in key and key.endswith("experts.2.w1.weight")]
        if gone:
            save_file({k: v for k, v in tensors.items() if k not in gone}, file, metadata={"format": "pt"})
    with pytest.raises(InvalidModel, match=r"layers\.1\.mlp\.experts\.gate_up_proj"):
        open_model(path, torch.float32)
