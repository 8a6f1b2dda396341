"""A frozen base that is kept in 4 or 8 bits, or as it was stored: values, training, bytes held and sent."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import linear

from tests.zero_core.frozen_runs import (
    LAYERS,
    OPTIMIZER,
    Run,
    Values,
    build,
    dequantized_by_bitsandbytes,
    is_quantized,
    plain,
    run_steps,
    train,
    whole_values,
)
from tests.zero_core.ranks import RankPool
from tests.zero_core.reference import relative_difference
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine
from zero_core.checkpoints import checkpoint
from zero_core.checkpoints.export import Parameters
from zero_core.config.zero import FrozenQuantization
from zero_core.planner.formulas import STORED_BYTES, model_state_bytes, unit_bytes

STEPS = 10
ONE_BY_ONE: dict[str, Any] = {"allgather_bucket_size": 0, "prefetch_bucket_size": 0}
"""Gathers of one unit at a time, so that memory shows what is there at once."""


def adapters(values: Values) -> Values:
    return {name: value for name, value in values.items() if "lora_" in name}


def moved(values: Values) -> float:
    start = {name: parameter.detach() for name, parameter in build().named_parameters()}
    return relative_difference(adapters(values), adapters(start))


def sent(run: Run, world_size: int, stage: int) -> tuple[int, float]:
    """Elements and bytes of a step in fp32: the table is gathered in forward alone."""
    if world_size == 1:
        return 0, 0
    trainable = {0: 2, 1: 2, 2: 2, 3: 3}[stage] * run.trainable
    frozen = {storage: 2 * elements for storage, elements in run.frozen.items()} if stage == 3 else {}
    if frozen:
        frozen["fp32"] -= run.table
    moving = 4 * trainable + sum(STORED_BYTES[storage] * n for storage, n in frozen.items())
    return trainable + sum(frozen.values()), moving * (world_size - 1) / world_size


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_adapters_on_nf4_train_as_in_plain_pytorch(
    pools: dict[int, RankPool], world_size: int, stage: int
) -> None:
    config = ZeroConfig(stage=stage, frozen_quantization="nf4", **ONE_BY_ONE)
    expected = plain(STEPS, quantized=True)
    assert moved(expected) > 0.03
    for run in pools[world_size].run(train, config, STEPS):
        for name, value in expected.items():
            if "lora_" not in name:
                assert torch.equal(run.values[name], value), name
        assert relative_difference(adapters(run.values), adapters(expected)) < 1e-5
        assert run.evaluated[0] != run.evaluated[1]
        elements, nbytes = sent(run, world_size, stage)
        assert (run.reports[-1].elements_sent, run.reports[-1].bytes_sent) == (elements, nbytes)
        _check_memory(run, world_size, stage)


def _check_memory(run: Run, world_size: int, stage: int) -> None:
    """The formula's bytes exactly between steps, and in a step two blocks beside them."""
    assert run.frozen.keys() == {"nf4", "fp32"}
    formula = model_state_bytes(run.trainable, world_size, stage, "fp32", run.frozen)
    parameters = run.memory["parameters"]
    assert parameters["current"]["device"] == formula["parameters"]
    assert run.memory["gradients"]["current"]["device"] == 0
    assert run.memory["optimizer"]["current"]["device"] == run.states
    block = unit_bytes("fp32", 0, 0, {"nf4": run.frozen["nf4"] // LAYERS})
    above = parameters["peak"]["device"] - formula["parameters"]
    if stage < 3 or world_size == 1:
        # Backward needs a block a moment before the one after it is released.
        assert above == 2 * block
    else:
        # Adapters, tables and norms are gathered too.
        rest = unit_bytes("fp32", 3, run.trainable, {"fp32": run.frozen["fp32"]})
        assert 2 * block < above <= 2 * block + rest


@pytest.mark.parametrize(
    ("mesh", "gathered"),
    [
        # Shares of a gather that a rank sends, in forward and backward of a step.
        ({"shard_size": 2}, 2 * 1 / 2),
        ({"node_size": 2}, 2 * (1 / 4 + 1 / 2)),
        # Frozen ones don't change: from the first gather on the second shard serves.
        ({"secondary_shard_size": 2}, 2 * 1 / 2),
    ],
)
def test_every_mesh_gathers_the_packed_form(
    pools: dict[int, RankPool], mesh: dict[str, int], gathered: float
) -> None:
    base = ZeroConfig(stage=3, frozen_quantization="nf4", **mesh)
    runs = pools[4].run(train, base, STEPS)
    without = pools[4].run(train, ZeroConfig(stage=3, **mesh), STEPS)
    expected = plain(STEPS, quantized=True)
    for run, unquantized in zip(runs, without, strict=True):
        assert relative_difference(adapters(run.values), adapters(expected)) < 1e-5
        assert all(torch.equal(run.values[n], v) for n, v in expected.items() if "lora_" not in n)
        report, whole = run.reports[-1], unquantized.reports[-1]
        shared = {"nf4": run.frozen["nf4"]}
        # Without quantization the same elements lie in fp32, each flat parameter padded to fewer of them.
        saved = gathered * (4 - STORED_BYTES["nf4"]) * shared["nf4"]
        assert whole.bytes_sent - report.bytes_sent == pytest.approx(saved, rel=0.01)
        if "secondary_shard_size" in mesh:
            less = unquantized.memory["parameters"]["current"]["device"]
            more = model_state_bytes(0, 4, 3, "fp32", run.frozen)["parameters"]
            assert less > run.memory["parameters"]["current"]["device"] > more


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 1), (3, 3)])
def test_in_lower_precision_the_base_is_the_same_on_every_plan(
    pools: dict[int, RankPool], world_size: int, stage: int
) -> None:
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        config = ZeroConfig(stage=stage, precision=precision, frozen_quantization="nf4")
        expected = dequantized_by_bitsandbytes(build(torch.bfloat16), dtype)
        runs = pools[world_size].run(train, config, 2, torch.bfloat16)
        for run in runs:
            assert all(torch.equal(run.values[name], value) for name, value in expected.items())
            assert run.evaluated[0] == runs[0].evaluated[0]
        assert all(torch.isfinite(torch.tensor(report.grad_norm)) for report in runs[0].reports)


def test_quantized_gathers_leave_alone_what_is_packed(pools: dict[int, RankPool]) -> None:
    config = ZeroConfig(stage=3, frozen_quantization="nf4", quantized_weights=True)
    expected = plain(STEPS, quantized=True)
    for run in pools[2].run(train, config, 2):
        assert all(torch.equal(run.values[n], v) for n, v in expected.items() if is_quantized(n))


@pytest.mark.parametrize(("world_size", "stage"), [(2, 1), (3, 3)])
def test_int8_stays_near_and_is_kept_in_a_byte(
    pools: dict[int, RankPool], world_size: int, stage: int
) -> None:
    exact = plain(STEPS, quantized=False)
    for run in pools[world_size].run(train, ZeroConfig(stage=stage, frozen_quantization="int8"), STEPS):
        for name, value in exact.items():
            if "base_layer" in name:
                half_steps = value.view(-1, 64).abs().amax(1) / 254
                errors = (run.values[name] - value).view(-1, 64).abs().amax(1)
                assert (errors <= 1.00001 * half_steps).all()
                assert errors.any()
        assert relative_difference(adapters(run.values), adapters(exact)) < 1e-3
        formula = model_state_bytes(run.trainable, world_size, stage, "fp32", run.frozen)
        assert run.memory["parameters"]["current"]["device"] == formula["parameters"]
        elements, nbytes = sent(run, world_size, stage)
        assert (run.reports[-1].elements_sent, run.reports[-1].bytes_sent) == (elements, nbytes)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 2), (3, 3)])
def test_a_base_in_bf16_is_kept_and_gathered_so_in_a_run_in_fp32(
    pools: dict[int, RankPool], world_size: int, stage: int, tied: bool
) -> None:
    expected = plain(STEPS, quantized=False, stored=torch.bfloat16, tied=tied)
    for run in pools[world_size].run(train, ZeroConfig(stage=stage), STEPS, torch.bfloat16, tied):
        assert all(torch.equal(run.values[n], v) for n, v in expected.items() if "lora_" not in n)
        assert relative_difference(adapters(run.values), adapters(expected)) < 1e-5
        frozen = {"bf16": run.frozen.pop("fp32")}
        assert not run.frozen
        formula = model_state_bytes(run.trainable, world_size, stage, "fp32", frozen)
        assert run.memory["parameters"]["current"]["device"] == formula["parameters"]
        if stage == 3:
            # A tied table is needed in backward as the output layer; an embedding alone is not.
            elements = 2 * frozen["bf16"] - (0 if tied else run.table)
            moving = 4 * 3 * run.trainable + 2 * elements
            assert run.reports[-1].bytes_sent == moving * (world_size - 1) / world_size


@pytest.mark.parametrize(("stage", "recompute"), [(0, "other"), (3, "other"), (1, "reentrant")])
def test_blocks_may_be_recomputed_and_micro_batches_accumulated(
    pools: dict[int, RankPool], stage: int, recompute: str
) -> None:
    config = ZeroConfig(stage=stage, frozen_quantization="nf4", gradient_accumulation_steps=3)
    expected = plain(STEPS, quantized=True)
    for run in pools[2].run(train, config, STEPS, torch.float32, False, recompute):
        assert relative_difference(adapters(run.values), adapters(expected)) < 1e-5


# A table whose weight is read without calling it; and what can't be.


class Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 64)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))])
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks[0](self.table(ids)) * self.scale
        return linear(x, self.table.weight)


def outside() -> nn.Module:
    torch.manual_seed(0)
    model = Outside()
    for module in (model.table, model.blocks):
        module.to(torch.bfloat16).requires_grad_(False)
    return model


def losses_with_a_table_read_from_outside(stage: int) -> list[float]:
    model = outside()
    engine = ZeroEngine(model, ZeroConfig(stage=stage), AdamWConfig(lr=0.1))
    ids = torch.arange(8).view(2, 4)
    losses = []
    for _ in range(4):
        loss = engine(ids).square().mean()
        engine.backward(loss)
        engine.step()
        with torch.no_grad():
            losses += [loss.item(), engine(ids).square().mean().item()]
    engine.close()
    return losses


@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 1)])
def test_a_table_that_is_read_from_outside_is_there(
    pools: dict[int, RankPool], world_size: int, stage: int
) -> None:
    model = outside().float()
    optimizer = torch.optim.AdamW([model.scale], lr=0.1, weight_decay=0)
    ids = torch.arange(8).view(2, 4)
    expected = []
    for _ in range(4):
        loss = model(ids).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected += [loss.item(), model(ids).square().mean().item()]
    for losses in pools[world_size].run(losses_with_a_table_read_from_outside, stage):
        assert losses == pytest.approx(expected, rel=1e-5)


def refusals() -> list[str]:
    """What a thawed parameter, and a model with nothing to quantize, are answered with."""
    messages = []
    model = outside()
    engine = ZeroEngine(model, ZeroConfig(stage=3, frozen_quantization="nf4"))
    model.blocks[0][1].weight.requires_grad_(True)
    loss = engine(torch.arange(8).view(2, 4)).square().mean()
    try:
        engine.backward(loss)
    except ValueError as error:
        messages.append(str(error))
    engine.communicator.close()
    try:
        ZeroEngine(outside().requires_grad_(True), ZeroConfig(stage=3, frozen_quantization="int8"))
    except ValueError as error:
        messages.append(str(error))
    return messages


def test_what_cannot_be_is_refused_by_name(pools: dict[int, RankPool]) -> None:
    thawed, nothing = pools[1].run(refusals)[0]
    assert thawed.startswith("blocks.0.1.weight can't be trained from now on")
    assert nothing.startswith("frozen_quantization: 'int8' is for frozen weights")


# From files, and to files.


class Stored:
    """Weights of which any range is read; each rank's own and no more at once than a segment of them."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self.read_elements: dict[str, int] = defaultdict(int)

    def read(self, name: str, start: int, length: int) -> Tensor:
        self.read_elements[name] += length
        return self._values[name].reshape(-1)[start : start + length].clone()

    def stored_dtype(self, name: str) -> torch.dtype:
        return self._values[name].dtype


def from_files(stage: int, quantization: FrozenQuantization | None) -> tuple[Values, Values, dict[str, int]]:
    config = ZeroConfig(stage=stage, frozen_quantization=quantization)
    whole = outside()
    stored = Stored({name: p.detach().clone() for name, p in whole.named_parameters()})
    engine = ZeroEngine(whole, config)
    expected = whole_values(engine)
    engine.close()
    # The dtype that a model was built in says nothing: what is stored does.
    engine = ZeroEngine(outside().float().to("meta"), config, weights=stored)
    assert all(flat.transient for unit in engine.units for flat in unit.flats if not flat.trainable)
    found = whole_values(engine)
    engine.close()
    return expected, found, dict(stored.read_elements)


@pytest.mark.parametrize("quantization", ["nf4", None])
@pytest.mark.parametrize(("world_size", "stage"), [(2, 1), (3, 3)])
def test_each_rank_reads_and_encodes_its_own_slices(
    pools: dict[int, RankPool], world_size: int, stage: int, quantization: FrozenQuantization | None
) -> None:
    answers = pools[world_size].run(from_files, stage, quantization)
    for expected, found, _ in answers:
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert all(torch.equal(found[name], value) for name, value in answers[0][1].items())
    name = "blocks.0.0.weight"
    assert torch.equal(answers[0][1][name], outside().blocks[0][0].weight.float()) is (quantization is None)
    elements = [read.get(name, 0) for _, _, read in answers]
    copies = world_size if stage < 3 else 1
    assert sum(elements) == copies * 64 * 64


def saved_and_resumed(directory: Path) -> tuple[Run, Run, Values]:
    """Two steps, a checkpoint at stage 3 and its result; then two more at stage 1, and all four at once."""
    first = ZeroConfig(stage=3, frozen_quantization="nf4")
    engine = ZeroEngine(build(), first, OPTIMIZER)
    run_steps(engine, 0, 2, Run())
    checkpoint.save(engine, directory / "checkpoint", {})
    result = {
        name: value.clone() for unit in engine.gathered() for name, value in Parameters()(unit, keep=True)
    }
    engine.close()
    engine = ZeroEngine(build(), ZeroConfig(stage=1, frozen_quantization="nf4"), OPTIMIZER)
    checkpoint.load(engine, directory / "checkpoint")
    resumed = Run()
    run_steps(engine, 2, 4, resumed)
    resumed.values = whole_values(engine)
    engine.close()
    return resumed, train(first, 4), result


def test_a_checkpoint_has_the_adapters_and_a_result_the_values_of_the_base(
    pools: dict[int, RankPool], tmp_path: Path
) -> None:
    expected = plain(4, quantized=True)
    base = {name: value for name, value in expected.items() if "lora_" not in name}
    for resumed, at_once, result in pools[2].run(saved_and_resumed, tmp_path):
        assert relative_difference(resumed.values, expected) < 1e-5
        assert relative_difference(at_once.values, expected) < 1e-5
        assert all(torch.equal(result[name], value) for name, value in base.items())
    shards = (tmp_path / "checkpoint").glob("rank-*.safetensors")
    assert not any("base_layer" in key for path in shards for key in load_file(path))
