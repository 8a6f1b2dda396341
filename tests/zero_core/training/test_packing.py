"""Packing on the engine: which models pack, and what the pieces of a loss cost at stage 3."""

import pytest
import torch

from tests.zero_core.models.families import VOCABULARY, build, recurrent
from tests.zero_core.ranks import RankPool
from zero_core import AdamWConfig, TrainConfig, ZeroConfig, ZeroEngine
from zero_core.data.batches import Item, collate
from zero_core.data.tokenize import TokenizedExample
from zero_core.models.token_scores import TokenScorer
from zero_core.training.micro_batches import score
from zero_core.training.packing import packs


def packs_on_engine(family: str) -> bool:
    model = recurrent() if family == "recurrent" else build(family)
    TokenScorer(model, TrainConfig.logits_bytes)
    engine = ZeroEngine(model, ZeroConfig(stage=3), AdamWConfig())
    found = packs(engine, model, VOCABULARY)
    engine.close()
    return found


@pytest.mark.parametrize(
    ("family", "expected"), [("llama", True), ("gpt2", True), ("capped", True), ("recurrent", False)]
)
def test_a_model_packs_if_it_keeps_sequences_apart(
    pools: dict[int, RankPool], family: str, expected: bool
) -> None:
    assert pools[2].run(packs_on_engine, family) == [expected] * 2


def elements_of_steps(logits_bytes: int) -> list[int]:
    model = build("llama")
    TokenScorer(model, logits_bytes)
    engine = ZeroEngine(model, ZeroConfig(stage=3), AdamWConfig())
    assert packs(engine, model, VOCABULARY)
    ids = torch.randint(3, VOCABULARY, (20,), generator=torch.Generator().manual_seed(0)).int().numpy()
    example = TokenizedExample(ids, ids > 0)
    # The ranks have unlike numbers of targets, so of pieces.
    items = [Item(0, (example,))] * (1 + engine.communicator.rank)
    sent = []
    for _ in range(4):
        batch = collate(items, 0, packed=True)
        engine.backward(-score(engine, batch).log_probs.mean(), len(batch.targets))
        report = engine.step()
        assert report is not None
        sent.append(report.elements_sent)
    sent.append(3 * engine.trainable_elements)
    engine.close()
    return sent


def test_pieces_gather_nothing_twice(pools: dict[int, RankPool]) -> None:
    """Three elements a parameter and step, as without pieces."""
    for *sent, expected in pools[2].run(elements_of_steps, 4 * 4 * VOCABULARY):
        assert sent[1:] == [expected] * 3
