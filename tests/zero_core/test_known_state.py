"""Faults of what lies beside the gradients that users reported of other engines.

Buffers that drift, optimizers of parameters that are no longer there, copies that a load leaves stale, and
ranks that wait for one that has failed.
"""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.zero_core.hard_models import (
    OPTIMIZER,
    Case,
    Normed,
    Pairs,
    assert_alike,
    in_plain_pytorch,
    inputs,
    on_engine,
    state_of,
)
from tests.zero_core.ranks import RankError, RankPool
from tests.zero_core.test_known_faults import straight
from zero_core import OptimizerConfig, ZeroConfig, ZeroEngine
from zero_core.checkpoints import checkpoint

STAGES = [0, 1, 2, 3]

NORMED = Case(Normed, straight, steps=4)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_running_statistics_are_the_mean_of_what_each_rank_saw(
    pools: dict[int, RankPool], stage: int, accumulation: int
) -> None:
    config = ZeroConfig(stage=stage, gradient_accumulation_steps=accumulation)
    ours = pools[2].run(on_engine, NORMED, config)
    expected = in_plain_pytorch(NORMED, config, 2)
    assert_alike(ours, expected)
    assert int(expected[0].weights["blocks.0.1.num_batches_tracked"]) == 4 * accumulation
    for name, tensor in ours[0].weights.items():
        assert torch.equal(tensor, ours[1].weights[name]), name


def evaluated(stage: int) -> tuple[Tensor, dict[str, Tensor]]:
    """After two steps: the output in evaluation mode, with each rank's own input, and the state."""
    torch.manual_seed(0)
    engine = ZeroEngine(Normed(), ZeroConfig(stage=stage), OPTIMIZER)
    for step in range(2):
        engine.backward(straight(engine, step, dist.get_rank()))
        engine.step()
    engine.model.eval()
    with torch.no_grad():
        output = engine(inputs(9, dist.get_rank())).clone()
    with engine.full_parameters() as model:
        state = state_of(model)
    engine.close()
    return output, state


@pytest.mark.parametrize("stage", STAGES)
def test_evaluation_with_running_statistics_is_plain_pytorchs_to_the_bit(
    pools: dict[int, RankPool], stage: int
) -> None:
    for rank, (output, state) in enumerate(pools[2].run(evaluated, stage)):
        plain = Normed().eval()
        plain.load_state_dict(state)
        with torch.no_grad():
            assert torch.equal(output, plain(inputs(9, rank)))


@pytest.mark.parametrize("build", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_that_was_built_before_is_refused_with_what_to_pass(
    build: type[torch.optim.Optimizer],
) -> None:
    """Else it would hold parameters that no longer train, as was reported of several engines."""
    model = Pairs()
    shapes = [p.shape for p in model.parameters()]
    with pytest.raises(ValueError, match=rf"^optimizer: a {build.__name__} was built .* pass AdamWConfig"):
        ZeroEngine(model, ZeroConfig(), build(model.parameters(), lr=0.1))  # type: ignore[arg-type, call-arg]
    assert [p.shape for p in model.parameters()] == shapes


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_the_fused_kernel_can_be_switched_off(name: str) -> None:
    """Without one, torch's optimizers refuse to scale gradients on their way."""
    weights = []
    for fused in (False, True):
        torch.manual_seed(0)
        engine = ZeroEngine(Pairs(), ZeroConfig(), OptimizerConfig(name, lr=0.1, options={"fused": fused}))
        for step in range(3):
            engine.backward(straight(engine, step, 0), target_tokens=3)
            engine.step()
        weights.append(state_of(engine.model))
        engine.close()
    torch.testing.assert_close(*weights, rtol=1e-5, atol=1e-6)


def loaded_into_secondary_shards(path: Path) -> list[Tensor]:
    """Outputs when saved, two steps later, and once loaded again; and plain PyTorch's when saved."""
    torch.manual_seed(0)
    engine = ZeroEngine(Pairs(), ZeroConfig(stage=3, secondary_shard_size=2), OPTIMIZER)
    outputs = []

    def train_and_look(first: int, last: int) -> None:
        for step in range(first, last):
            engine.backward(straight(engine, step, dist.get_rank()))
            engine.step()
        with torch.no_grad():
            outputs.append(engine(inputs(9, 9)).clone())

    train_and_look(0, 2)
    with engine.full_parameters() as model:
        plain = Pairs()
        plain.load_state_dict(state_of(model))
    checkpoint.save(engine, path, {})
    train_and_look(2, 4)
    checkpoint.load(engine, path)
    train_and_look(4, 4)
    engine.close()
    with torch.no_grad():
        return [*outputs, plain(inputs(9, 9))]


def test_deepspeed_4851_and_7606_no_secondary_shard_is_stale_after_a_load(
    pools: dict[int, RankPool], tmp_path: Path
) -> None:
    for saved, later, loaded, plain in pools[4].run(loaded_into_secondary_shards, tmp_path / "step-2"):
        assert not torch.allclose(saved, later)
        assert torch.equal(saved, loaded)
        assert torch.equal(saved, plain)


class FailsOnRank1(nn.Module):
    """Its second call fails on rank 1: in forward, or when the gradient comes."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.body = Pairs()
        self.where = where
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        fails = self.calls == 2 and dist.get_rank() == 1
        x = self.body.blocks[1](self.body.blocks[0](x))
        if fails and self.where == "forward":
            raise ValueError("the cause")
        if fails:
            x.register_hook(self._fail)
        return self.body.blocks[2](x)

    def _fail(self, gradient: Tensor) -> None:
        raise ValueError("the cause")


def one_rank_fails(stage: int, where: str) -> None:
    dist.barrier()
    engine = ZeroEngine(FailsOnRank1(where), ZeroConfig(stage=stage, timeout_seconds=20.0), OPTIMIZER)
    for step in range(2):
        engine.backward(straight(engine, step, dist.get_rank()))
        engine.step()


@pytest.mark.parametrize(("stage", "where"), [(2, "backward"), (3, "forward"), (3, "backward")])
def test_a_failure_on_one_rank_ends_the_others_within_the_timeout(
    pools: dict[int, RankPool], stage: int, where: str
) -> None:
    with pytest.raises(RankError) as raised:
        pools[2].run(one_rank_fails, stage, where)
    assert "ValueError: the cause" in str(raised.value)
    assert "gave no answer" not in str(raised.value)
