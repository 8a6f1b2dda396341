"""What a run starts from: the model on the device, the tokenised files, and what was odd about them."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero_core.data.dataset import Dataset
from zero_core.models.loading import load_model
from zero_core.training.journal import Journal
from zero_core.training.preparing import Place, Preparation
from zero_core.training.run import Run, StopRequest


@dataclass(frozen=True)
class Inputs:
    model: Any
    """A ``PreTrainedModel`` on the device, in training mode."""

    tokenizer: Any
    training: Dataset
    validation: Dataset | None

    @property
    def vocabulary(self) -> int:
        """Tokens that the tokenizer knows."""
        return len(self.tokenizer)

    @property
    def pad_id(self) -> int:
        return int(self.tokenizer.pad_token_id)


def load_inputs(run: Run, device: torch.device, journal: Journal, stop: StopRequest) -> Inputs:
    """Collective. Raises InvalidModel, InvalidFile or Stopped, the last two on all ranks."""
    model, tokenizer = load_model(run.model_path, torch.float32)
    if run.train.gradient_checkpointing:
        model.activation_checkpointing_enable()
    max_length = _usable_length(run.train.max_length, model, journal)

    place = Place.of(dist.get_rank(), dist.get_world_size())
    datasets = Preparation(run, max_length, journal, stop, place).datasets()
    nn.Module.to(model, device).train()
    return Inputs(model, tokenizer, datasets.training, datasets.validation)


def _usable_length(max_length: int, model: Any, journal: Journal) -> int:
    """``max_length``, or as many positions as the model has: beyond those it has no answer or an error."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is None or max_length <= positions:
        return max_length
    journal.warn(
        f"max_length {max_length} is more than the model's {positions} positions; {positions} is used"
    )
    return int(positions)
