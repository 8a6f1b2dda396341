"""Does a model keep packed sequences apart? Tried, not assumed: some mix neighbours in ways of their own."""

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from zero_core.data.batches import Item, collate
from zero_core.data.tokenize import TokenizedExample
from zero_core.engine import ZeroEngine
from zero_core.models.attention import use_packed_attention
from zero_core.training.micro_batches import score

_LENGTH = 12


def packs(engine: ZeroEngine, model: PreTrainedModel, vocabulary: int) -> bool:
    """True: the model now takes packed rows, and a sequence's scores don't depend on its neighbours.

    Convolutions, recurrences and positions that are counted over the row are found out so. Collective.
    """
    if not use_packed_attention(model):
        return False
    ids = np.random.default_rng(0).integers(0, vocabulary, (3, _LENGTH))
    first, second, third = (TokenizedExample(row.astype(np.int32), np.ones(_LENGTH, np.bool_)) for row in ids)
    model.eval()
    try:
        with torch.no_grad():
            after_first = _second_of(engine, first, second)
            after_third = _second_of(engine, third, second)
            after_itself = _second_of(engine, second, second)
            alone = _scores(engine, second)
    finally:
        model.train()
    # Of one shape: a neighbour that is not seen changes no bit, or next to none.
    apart = torch.allclose(after_first, after_third, rtol=1e-4, atol=1e-4)
    low = engine.config.precision != "fp32"
    placed = torch.allclose(after_itself, alone, rtol=0.05 if low else 1e-3, atol=0.1 if low else 1e-3)
    agreed = engine.communicator.agree(torch.tensor([float(apart and placed)])).item()
    return int(agreed) == engine.communicator.world_size


def _second_of(engine: ZeroEngine, first: TokenizedExample, second: TokenizedExample) -> Tensor:
    return _scores(engine, first, second)[-(_LENGTH - 1) :]


def _scores(engine: ZeroEngine, *sequences: TokenizedExample) -> Tensor:
    batch = collate([Item(0, sequences)], pad_id=0, packed=True).to(engine.device)
    return score(engine, batch).log_probs.cpu()
