"""``python -m bench.finetuning.activations MODEL TASK``: what a micro-batch takes beside a plain model.

TASK is a file with the token ids and targets of a packed micro-batch's examples. Prints the bytes by which
resident memory grows at most in forward and backward, each gradient being dropped once it is complete.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch

from bench.memory import in_use, peak
from zero_core.data.batches import Item, collate
from zero_core.data.tokenize import TokenizedExample
from zero_core.memory.ledger import reset_peak
from zero_core.models.attention import use_packed_attention
from zero_core.models.loading import load_model
from zero_core.models.token_scores import TokenScorer

CPU = torch.device("cpu")


def main(model_path: Path, task: Path) -> None:
    torch.set_num_threads(1)
    given = json.loads(task.read_bytes())
    model, tokenizer = load_model(model_path, torch.float32)
    use_packed_attention(model)
    TokenScorer(model, given["logits_bytes"])
    model.train()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    items = [
        Item(index, (TokenizedExample(np.array(ids, np.int32), np.array(learnt, np.bool_)),))
        for index, (ids, learnt) in enumerate(given["examples"])
    ]
    batch = collate(items, int(tokenizer.pad_token_id), packed=True)
    before = in_use(CPU)
    reset_peak(CPU)
    scores = model(**batch.inputs, positions=batch.positions, targets=batch.targets)
    (-scores.log_probs.mean()).backward()
    print(peak(CPU) - before)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
