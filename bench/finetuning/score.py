"""``python -m bench.finetuning.score BASE RESULT EXAMPLES``: a result's loss, in plain transformers.

RESULT is a model or a peft adapter of BASE. Prints the mean negative log-likelihood of the target tokens.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def main(base: Path, result: Path, examples: Path) -> None:
    if (result / "adapter_config.json").is_file():
        model: Any = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), result
        )
    else:
        model = AutoModelForCausalLM.from_pretrained(result, dtype=torch.float32)
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for line in examples.read_text().splitlines():
            example = json.loads(line)
            ids = torch.tensor(example["ids"])
            learnt = torch.tensor(example["learnt"])[1:]
            log_probs = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1][learnt], -1)
            total -= log_probs.gather(1, ids[1:][learnt][:, None]).sum().item()
            count += int(learnt.sum())
    print(total / count)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
