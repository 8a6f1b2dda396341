"""What a run starts from: the model on the device, the tokenised files, and what was odd about them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_core.data.dataset import Dataset
from zero_core.data.formats import Param
from zero_core.journal import Journal
from zero_core.models import load_model
from zero_core.run import Run


@dataclass(frozen=True)
class Inputs:
    model: Any
    """A ``PreTrainedModel`` on the device, in training mode."""

    tokenizer: Any
    training: Dataset
    validation: Dataset | None

    @property
    def pad_id(self) -> int:
        return int(self.tokenizer.pad_token_id)


def load_inputs(run: Run, device: torch.device, journal: Journal) -> Inputs:
    model, tokenizer = load_model(run.model_path, torch.float32)
    if run.train.gradient_checkpointing:
        model.activation_checkpointing_enable()
    training = _dataset(run, run.training_file, "training_file", tokenizer, run.min_examples, journal)
    validation = None
    if run.validation_file is not None:
        validation = _dataset(run, run.validation_file, "validation_file", tokenizer, 1, journal)
    nn.Module.to(model, device).train()
    return Inputs(model, tokenizer, training, validation)


def _dataset(
    run: Run, path: Path, param: Param, tokenizer: Any, min_examples: int, journal: Journal
) -> Dataset:
    dataset = Dataset.from_file(path, tokenizer, run.train.max_length, min_examples, param)
    if dataset.truncated:
        journal.warn(
            f"{param}: {dataset.truncated} of {len(dataset)} examples were cut at "
            f"max_length {run.train.max_length}"
        )
    if dataset.dropped:
        journal.warn(
            f"{param}: {dataset.dropped} examples had no target token within max_length and were left out"
        )
    return dataset
