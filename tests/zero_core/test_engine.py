"""What models and callers do beside the straight path."""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import Node

from tests.zero_core.engine_runs import micro_batches, train, whole_weights
from tests.zero_core.ranks import RankError, RankPool
from tests.zero_core.reference import OPTIMIZER, build_model, global_batch, relative_difference
from tests.zero_core.token_loss import token_loss
from zero_core import AdamWConfig, StepReport, ZeroConfig, ZeroEngine

STAGES = [0, 1, 2, 3]


class Parts(nn.Module):
    """Blocks of which one is called twice, one is frozen, one may go unused, and a 0-dim scale."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.blocks[2].requires_grad_(False)

    def forward(self, x: Tensor, use_last: bool) -> Tensor:
        x = torch.tanh(self.blocks[0](x))
        x = torch.tanh(self.blocks[1](x))
        x = torch.tanh(self.blocks[0](x))
        x = torch.tanh(self.blocks[2](x))
        if use_last:
            x = self.blocks[3](x)
        return (x * self.scale).square().mean(-1)


def build_parts() -> Parts:
    torch.manual_seed(3)
    return Parts()


def inputs(step: int) -> Tensor:
    return torch.randn(12, 6, generator=torch.Generator().manual_seed(step))


USES_LAST = [True, False, True, False, False, True]


def plain_parts() -> dict[str, Tensor]:
    model = build_parts()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}], lr=1e-2
    )
    for step, use_last in enumerate(USES_LAST):
        model(inputs(step), use_last).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


def engine_parts(stage: int, divergent: bool) -> dict[str, Tensor]:
    """With ``divergent``, only rank 0 uses the last block in a step that uses it."""
    engine = ZeroEngine(build_parts(), ZeroConfig(stage=stage), AdamWConfig(lr=1e-2, weight_decay=0.1))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step, use_last in enumerate(USES_LAST):
        x = inputs(step)
        if not divergent:
            engine.backward(engine(x[rank::world_size], use_last).mean())
        elif use_last and rank == 0:
            engine.backward(engine(x, True).mean(), target_tokens=1)
        else:
            engine.backward(engine(x, False).mean(), target_tokens=0 if use_last else 1)
        engine.step()
    weights = whole_weights(engine)
    engine.close()
    return weights


@pytest.mark.parametrize("stage", STAGES)
def test_called_twice_frozen_unused_and_scalar_parameters_train_as_in_plain_pytorch(
    pools: dict[int, RankPool], stage: int
) -> None:
    ours = pools[3].run(engine_parts, stage, False)[0]
    assert relative_difference(ours, plain_parts()) < 1e-5


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_block_that_one_rank_alone_uses_gets_its_gradient(pools: dict[int, RankPool], stage: int) -> None:
    ours = pools[2].run(engine_parts, stage, True)[0]
    assert relative_difference(ours, plain_parts()) < 1e-5


def bf16_weights(stage: int, steps: int) -> dict[str, Tensor]:
    return train(ZeroConfig(stage=stage, precision="bf16"), True, steps).weights


def plain_bf16(steps: int) -> dict[str, Tensor]:
    """bf16 compute on fp32 masters, by hand."""
    masters = build_model(tied=True)
    model = build_model(tied=True).to(torch.bfloat16)
    matrices = [p for p in masters.parameters() if p.dim() >= 2]
    others = [p for p in masters.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": OPTIMIZER.weight_decay}, {"params": others, "weight_decay": 0}],
        lr=OPTIMIZER.lr,
    )
    for step in range(steps):
        loss = token_loss(model, global_batch(step))
        loss.mean.backward()
        for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        for master, parameter in zip(masters.parameters(), model.parameters(), strict=True):
            parameter.data.copy_(master)
    return {name: p.detach().float() for name, p in model.named_parameters()}


@pytest.mark.parametrize("stage", STAGES)
def test_bf16_with_fp32_masters_follows_the_same_done_by_hand(pools: dict[int, RankPool], stage: int) -> None:
    expected = plain_bf16(10)
    start = {name: p.detach() for name, p in build_model(tied=True).named_parameters()}
    moved = relative_difference(expected, start)
    ours = pools[2].run(bf16_weights, stage, 10)[0]
    # bf16 has 8 bits: gradients summed in another order differ by that much of the way travelled.
    assert relative_difference(ours, expected) < 0.1 * moved


def checkpointed(stage: int) -> tuple[dict[str, Tensor], int, int]:
    model = build_model(tied=True)
    model.activation_checkpointing_enable()
    model.train()
    engine = ZeroEngine(model, ZeroConfig(stage=stage), OPTIMIZER)
    elements = 0
    for step in range(4):
        (micro_batch,) = micro_batches(global_batch(step), 1)
        loss = token_loss(engine, micro_batch)
        engine.backward(loss.mean, loss.tokens)
        report = engine.step()
        assert report is not None
        elements = report.elements_sent
    weights, psi = whole_weights(engine), engine.trainable_elements
    engine.close()
    return weights, elements, psi


@pytest.mark.parametrize("stage", STAGES)
def test_activation_checkpointing_changes_nothing_and_gathers_nothing_twice(
    pools: dict[int, RankPool], stage: int
) -> None:
    weights, elements, psi = pools[2].run(checkpointed, stage)[0]
    plain = pools[2].run(train, ZeroConfig(stage=stage), True, 4)[0]
    assert relative_difference(weights, plain.weights) < 1e-6
    assert elements == (3 if stage == 3 else 2) * psi


def poisoned() -> list[StepReport]:
    """Rank 1 alone has a loss that is not a number in the second step."""
    engine = ZeroEngine(build_model(tied=False), ZeroConfig(stage=3), OPTIMIZER)
    reports, weights = [], []
    for step in range(3):
        (micro_batch,) = micro_batches(global_batch(step), 1)
        loss = token_loss(engine, micro_batch)
        bad = step == 1 and dist.get_rank() == 1
        engine.backward(loss.mean * (float("nan") if bad else 1.0), loss.tokens)
        report = engine.step()
        assert report is not None
        reports.append(report)
        weights.append(whole_weights(engine))
    engine.close()
    if dist.get_rank() == 0:
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
        assert not torch.equal(weights[1]["lm_head.weight"], weights[2]["lm_head.weight"])
    return reports


def test_a_gradient_that_is_not_finite_is_skipped_by_every_rank(pools: dict[int, RankPool]) -> None:
    for reports in pools[2].run(poisoned):
        assert [report.skipped for report in reports] == [False, True, False]
        assert [report.step for report in reports] == [1, 2, 3]


def released() -> tuple[list[Any], list[Any], bool]:
    model = build_model(tied=True)
    before = [(id(p), p.shape, p.numel(), p.dtype) for p in model.parameters()]
    engine = ZeroEngine(model, ZeroConfig(stage=3), OPTIMIZER)
    after = [(id(p), p.shape, p.numel(), p.dtype) for p in model.parameters()]
    gone = all(bool(p.isnan().all()) for p in model.parameters())
    with engine.full_parameters():
        gone = gone and not any(bool(p.isnan().any()) for p in model.parameters())
    engine.close()
    return before, after, gone


def test_a_released_parameter_is_the_same_object_with_its_shape_and_reads_as_nan(
    pools: dict[int, RankPool],
) -> None:
    for before, after, gone in pools[2].run(released):
        assert before == after
        assert gone


def generate_between_steps() -> list[list[int]]:
    engine = ZeroEngine(build_model(tied=True), ZeroConfig(stage=3), OPTIMIZER)
    answers = []
    for step in range(2):
        engine.model.eval()
        with engine.full_parameters() as model:
            prompt = torch.tensor([[1, 2, 3]])
            answer = model.generate(  # type: ignore[operator]
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=4 + dist.get_rank(),
                do_sample=False,
            )
        answers.append(answer[0, :7].tolist())
        engine.model.train()
        (micro_batch,) = micro_batches(global_batch(step), 1)
        loss = token_loss(engine, micro_batch)
        engine.backward(loss.mean, loss.tokens)
        engine.step()
    engine.close()
    return answers


def test_generate_between_steps_at_unequal_lengths_is_plain_generate(pools: dict[int, RankPool]) -> None:
    first, second = pools[2].run(generate_between_steps)
    assert first == second
    prompt = torch.tensor([[1, 2, 3]])
    plain = build_model(tied=True).generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False
    )
    assert first[0] == plain[0].tolist()


def different_models() -> None:
    ZeroEngine(build_model(tied=True, layers=2 + dist.get_rank()), ZeroConfig(stage=3))


def test_ranks_with_different_models_are_told_so(pools: dict[int, RankPool]) -> None:
    with pytest.raises(RankError, match="rank 0 and rank 1 do not agree"):
        pools[2].run(different_models)


def different_seeds() -> bool:
    model = build_model(tied=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += dist.get_rank()
    engine = ZeroEngine(model, ZeroConfig(stage=1))
    expected = dict(build_model(tied=True).named_parameters())
    same = all(torch.equal(p, expected[name]) for name, p in engine.model.named_parameters())
    engine.close()
    return same


def test_every_rank_starts_from_rank_0s_weights(pools: dict[int, RankPool]) -> None:
    assert pools[3].run(different_seeds) == [True, True, True]


def one_backward_too_many() -> None:
    engine = ZeroEngine(build_model(tied=True), ZeroConfig(stage=0))
    for _ in range(2):
        loss = token_loss(engine, global_batch(0))
        engine.backward(loss.mean, loss.tokens)


def test_a_forgotten_step_is_an_error(pools: dict[int, RankPool]) -> None:
    with pytest.raises(RankError, match=r"1 times in this step; call step\(\)"):
        pools[1].run(one_backward_too_many)


def nodes_left(stage: int) -> int:
    """Nodes of autograd's graphs that only the cycle collector would free, after some steps."""
    gc.collect()
    gc.disable()
    try:
        train(ZeroConfig(stage=stage), False, steps=2)
        return sum(issubclass(type(found), Node) for found in gc.get_objects())
    finally:
        gc.enable()


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_leaves_nothing_of_its_graph_behind(pools: dict[int, RankPool], stage: int) -> None:
    """What is freed late lies all over the heap, which then grows step by step."""
    assert pools[2].run(nodes_left, stage) == [0, 0]
