"""``python -m zero_core.training.recording MODEL_DIR [--train JSON]``: a model's profile, as JSON.

Of the weights nothing but their headers is read, so a laptop records what no host of its could train.
"""

import argparse
import hashlib
import json
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import Tensor
from transformers import PreTrainedModel

from zero_core.config.train import TrainConfig
from zero_core.config.zero import Precision
from zero_core.models.loading import open_model
from zero_core.models.token_scores import TokenScorer, TokenScores
from zero_core.planner.profile import ModelProfile
from zero_core.sharding.flat_parameter import Weights
from zero_core.training.profiling import PIECE, Case, Inputs, Subject, profile


def record(path: Path, train: TrainConfig, precision: Precision, device: torch.device) -> ModelProfile:
    """Of the model in directory ``path`` as ``train`` trains it. Raises InvalidModel and ValueError as a run
    would."""
    opened = open_model(path, torch.float32)
    weights: Weights = opened.weights
    if train.lora is not None:
        # Loads peft, which takes seconds.
        from zero_core.models.adapters import add_lora

        weights = add_lora(opened.model, train.lora, train.seed).weights(weights)
    digest = hashlib.sha256((path / "config.json").read_bytes()).hexdigest()
    subject = scored(opened.model.train(), weights)
    return profile(f"sha256:{digest}", subject, train, precision, device, _length(train, opened.model))


def scored(model: PreTrainedModel, weights: Weights) -> Subject:
    """A causal language model under the training loop. A method's own loss is of a few numbers a target."""
    return Subject(model, _prepare, _inputs, _loss, weights.stored_dtype, takes_packed=True)


def _prepare(model: PreTrainedModel) -> None:
    TokenScorer(model, logits_bytes=4 * model.config.get_text_config().vocab_size * PIECE)


def _length(train: TrainConfig, model: PreTrainedModel) -> int:
    return min(train.max_length, getattr(model.config, "max_position_embeddings", None) or train.max_length)


def _inputs(case: Case) -> Inputs:
    """What ``data.batches.collate`` makes of it."""
    inputs: Inputs = {name: torch.zeros(case.targets, dtype=torch.int64) for name in ("positions", "targets")}
    if case.packed:
        row = (1, sum(case.lengths))
        inputs |= {name: torch.zeros(row, dtype=torch.int64) for name in ("input_ids", "position_ids")}
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        return inputs | {"attention_mask": mask, "packed_lengths": case.lengths}
    rows = (len(case.lengths), case.lengths[0])
    return inputs | {name: torch.zeros(rows, dtype=torch.int64) for name in ("input_ids", "attention_mask")}


def _loss(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    scores: TokenScores = model(**inputs)
    return -scores.log_probs.sum() / len(scores.log_probs)


def _precision(train: TrainConfig, device: torch.device) -> Precision:
    if train.precision != "auto":
        return train.precision
    return "bf16" if device.type == "cuda" else "fp32"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m zero_core.training.recording", description=__doc__)
    parser.add_argument("model", type=Path, metavar="MODEL_DIR")
    parser.add_argument(
        "--train", type=json.loads, default={}, metavar="JSON", help="settings of TrainConfig"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default=None)
    arguments = parser.parse_args()
    train = TypeAdapter(TrainConfig).validate_python(arguments.train)
    device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    print(record(arguments.model, train, _precision(train, device), device).to_json())


if __name__ == "__main__":
    main()
