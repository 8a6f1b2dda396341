"""What a run starts from: the model to be filled, the tokenised files, and what was odd about them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero_core.data.dataset import Dataset
from zero_core.data.formats import Param
from zero_core.models.loading import open_model
from zero_core.models.weights import WeightFiles
from zero_core.training.journal import Journal
from zero_core.training.run import Run


@dataclass(frozen=True)
class Inputs:
    model: Any
    """A ``PreTrainedModel`` in training mode: parameters without values, buffers on the device."""

    weights: WeightFiles
    """Where the parameters' values come from, and how the result is stored."""

    tokenizer: Any
    training: Dataset
    validation: Dataset | None

    @property
    def pad_id(self) -> int:
        return int(self.tokenizer.pad_token_id)


def load_inputs(run: Run, device: torch.device, journal: Journal) -> Inputs:
    opened = open_model(run.model_path, torch.float32)
    model, tokenizer = opened.model, opened.tokenizer
    if run.train.gradient_checkpointing:
        model.activation_checkpointing_enable()
    max_length = _usable_length(run.train.max_length, model, journal)

    def dataset(path: Path, param: Param, min_examples: int) -> Dataset:
        loaded = Dataset.from_file(path, tokenizer, max_length, min_examples, param)
        _warn_of_losses(loaded, param, max_length, journal)
        return loaded

    training = dataset(run.training_file, "training_file", run.min_examples)
    validation = None
    if run.validation_file is not None:
        validation = dataset(run.validation_file, "validation_file", 1)
    for buffer in model.buffers():
        buffer.data = buffer.to(device)
    model.train()
    return Inputs(model, opened.weights, tokenizer, training, validation)


def _usable_length(max_length: int, model: Any, journal: Journal) -> int:
    """``max_length``, or as many positions as the model has: beyond those it has no answer or an error."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is None or max_length <= positions:
        return max_length
    journal.warn(
        f"max_length {max_length} is more than the model's {positions} positions; {positions} is used"
    )
    return int(positions)


def _warn_of_losses(dataset: Dataset, param: Param, max_length: int, journal: Journal) -> None:
    if dataset.truncated:
        journal.warn(
            f"{param}: {dataset.truncated} of {len(dataset)} examples were cut at max_length {max_length}"
        )
    if dataset.dropped:
        journal.warn(
            f"{param}: {dataset.dropped} examples had no target token within max_length and were left out"
        )
