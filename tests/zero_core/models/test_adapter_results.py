"""The adapter alone and the merged model, as peft and transformers load them."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from tests.tiny_model import byte_tokenizer, write_tiny_model
from tests.zero_core import lora_runs
from tests.zero_core.lora_runs import Plan, quiet_peft
from tests.zero_core.ranks import RankPool
from zero_core.checkpoints.adapter_export import export_adapter
from zero_core.checkpoints.export import export
from zero_core.config.lora import LoraConfig
from zero_core.models.loading import open_model
from zero_core.models.merging import MergedBase, MergedResults

STEPS = 3


@dataclass(frozen=True)
class Case:
    name: str
    world_size: int
    plan: Plan
    lora: LoraConfig = field(default_factory=lambda: LoraConfig(r=4, alpha=64))
    tie: bool = True
    stored: str = "float32"
    kind: str = "llama"


CASES = [
    Case("tied", 2, Plan(3, on_meta=True)),
    Case("untied-scaled-by-rank", 3, Plan(1), LoraConfig(r=4, alpha=64, use_rslora=True), tie=False),
    Case("tied-embeddings-trained", 2, Plan(3), LoraConfig(r=4, alpha=64, modules_to_save=("embed_tokens",))),
    Case("head-trained", 1, Plan(2), LoraConfig(r=4, alpha=64, modules_to_save=("lm_head",)), tie=False),
    Case("tied-head-adapted", 2, Plan(3), LoraConfig(r=4, alpha=64, target_modules=("q_proj", "lm_head"))),
    Case("transposed-layers", 2, Plan(2), kind="gpt2"),
    Case("transposed-embeddings-trained", 2, Plan(3), LoraConfig(r=4, modules_to_save=("wte",)), kind="gpt2"),
    Case("bf16", 2, Plan(3, "bf16", on_meta=True), stored="bfloat16"),
    Case(
        "bf16-head-trained",
        3,
        Plan(1, "bf16"),
        LoraConfig(r=4, modules_to_save=("lm_head",)),
        stored="bfloat16",
    ),
]


def write_base(path: Path, case: Case) -> Path:
    """With more rows than the tokenizer has tokens in GPT-2, as bases that were padded have."""
    if case.kind == "llama":
        write_tiny_model(path, tie=case.tie)
    else:
        sizes = {"vocab_size": 264, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
        torch.manual_seed(0)
        GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).save_pretrained(path)
        byte_tokenizer().save_pretrained(path)
    dtype = getattr(torch, case.stored)
    AutoModelForCausalLM.from_pretrained(path, dtype=dtype).save_pretrained(path)
    return path


def train_and_export(base: Path, case: Case, out: Path) -> tuple[Tensor, list[Any]]:
    engine, adapters = lora_runs.build(base, case.plan, case.lora)
    lora_runs.run_steps(engine, STEPS)
    logits = lora_runs.logits(engine)
    config = AutoConfig.from_pretrained(base)
    if adapters.unties:
        config.tie_word_embeddings = False
    stored = MergedBase(open_model(base, torch.float32).weights, adapters)

    def beside_adapter(directory: Path) -> None:
        adapters.write_config(directory, str(base))
        AutoTokenizer.from_pretrained(base).save_pretrained(directory)

    alone = export_adapter(engine, out / "adapter", adapters.stored_keys, beside_adapter)
    results = MergedResults(engine, adapters)
    merged = export(engine, out / "merged", stored, lambda path: config.save_pretrained(path), results)
    names = [name for unit in engine.gathered() for name, _ in results(unit, keep=True)]
    assert len(names) == len(set(names))
    assert names == [name for unit in engine.units for name in results.names(unit)]
    # Nothing of the engine has changed.
    assert torch.equal(lora_runs.logits(engine), logits)
    engine.close()
    assert (alone is None) == (merged is None) == (dist.get_rank() != 0)
    return logits, [alone, merged]


@dataclass(frozen=True)
class Results:
    case: Case
    base: Path
    adapter: Path
    merged: Path
    logits: Tensor
    exported: list[Any]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def results(
    pools: dict[int, RankPool], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Results:
    case = request.param
    directory = tmp_path_factory.mktemp(case.name)
    base = write_base(directory / "base", case)
    logits, exported = pools[case.world_size].run(train_and_export, base, case, directory)[0]
    return Results(case, base, directory / "adapter", directory / "merged", logits, exported)


def load(path: Path, dtype: torch.dtype) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True)
    assert not any(info[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model


def with_adapter(results: Results) -> PeftModel:
    base = load(results.base, getattr(torch, results.case.stored))
    if results.case.name == "tied-head-adapted":
        # peft's merge would add the output layer's update to the embeddings as well.
        base.lm_head.weight = nn.Parameter(base.lm_head.weight.clone())
        base.config.tie_word_embeddings = False
    with quiet_peft():
        return PeftModel.from_pretrained(base, results.adapter)


def agree(results: Results, theirs: Tensor) -> None:
    base = lora_runs.logits(load(results.base, torch.float32))
    moved = (results.logits - base).norm()
    assert moved > 0.1 * base.norm()
    if results.case.plan.precision == "fp32":
        torch.testing.assert_close(theirs, results.logits, rtol=1e-5, atol=1e-5)
    else:
        # The engine rounds adapters to bf16 and sums their part in bf16; a merged weight is rounded itself.
        assert (theirs - results.logits).norm() < 0.02 * results.logits.norm()


def test_the_adapter_over_the_base_gives_the_engines_logits(results: Results) -> None:
    agree(results, lora_runs.logits(with_adapter(results)))


def test_the_merged_model_gives_the_engines_logits(results: Results) -> None:
    merged = load(results.merged, getattr(torch, results.case.stored))
    tied = results.case.tie and results.case.name != "tied-head-adapted"
    assert merged.config.tie_word_embeddings is tied
    assert (merged.get_input_embeddings().weight is merged.get_output_embeddings().weight) is tied
    agree(results, lora_runs.logits(merged))


def test_the_merged_weights_are_pefts_bit_for_bit(results: Results) -> None:
    theirs = with_adapter(results).merge_and_unload().state_dict()
    ours = load(results.merged, getattr(torch, results.case.stored)).state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(ours[name], value), name


def test_files_are_pefts_and_readable(results: Results) -> None:
    lora = results.case.lora
    config = peft.LoraConfig(
        r=lora.r,
        target_modules=lora.target_modules
        if lora.target_modules == "all-linear"
        else list(lora.target_modules),
        **json_fields(results.adapter, "modules_to_save", "ensure_weight_tying", "fan_in_fan_out"),
    )
    with quiet_peft():
        theirs = peft.get_peft_model(load(results.base, torch.float32), config)
    expected = peft.get_peft_model_state_dict(theirs, save_embedding_layers=False)
    stored = load_file(results.adapter / "adapter_model.safetensors")
    assert {name: value.shape for name, value in stored.items()} == {
        name: value.shape for name, value in expected.items()
    }
    assert {value.dtype for value in stored.values()} == {torch.float32}
    assert results.exported[0].bytes == sum(value.nbytes for value in stored.values())
    assert (results.adapter / "adapter_model.safetensors").stat().st_mode & 0o777 == 0o644
    assert json_fields(results.adapter, "base_model_name_or_path") == {
        "base_model_name_or_path": str(results.base)
    }
    assert len(AutoTokenizer.from_pretrained(results.adapter)) == 258
    assert sorted(path.name for path in results.adapter.parent.iterdir()) == ["adapter", "base", "merged"]


def json_fields(adapter: Path, *names: str) -> dict[str, Any]:
    config = json.loads((adapter / "adapter_config.json").read_text())
    return {name: config[name] for name in names}
