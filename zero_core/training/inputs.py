"""What a run starts from: the model to be filled, the tokenised files, and what was odd about them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zero_core.config.checks import InvalidSetting
from zero_core.data.dataset import Dataset
from zero_core.models.loading import open_model
from zero_core.models.weights import WeightFiles
from zero_core.sharding.flat_parameter import Weights
from zero_core.training.beating import BeatingWeights
from zero_core.training.journal import Journal
from zero_core.training.preparing import Place, Preparation
from zero_core.training.run import Run, StopRequest

if TYPE_CHECKING:
    from zero_core.models.adapters import Adapters


@dataclass(frozen=True)
class Inputs:
    model: Any
    """A ``PreTrainedModel`` in training mode, its parameters on the meta device."""

    weights: Weights
    """Where the values of its parameters come from."""

    base: WeightFiles
    """How the base model is stored."""

    adapters: "Adapters | None"
    """What is trained instead of the model's own weights."""

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
    """Collective. Raises InvalidModel, InvalidSetting, InvalidFile or Stopped, on all ranks, but for the
    first."""
    opened = open_model(run.model_path, torch.float32)
    model = opened.model
    if run.train.gradient_checkpointing:
        model.activation_checkpointing_enable()
    adapters = _add_adapters(run, model, journal)
    max_length = _usable_length(run.train.max_length, model, journal)
    place = Place.of(dist.get_rank(), dist.get_world_size())
    datasets = Preparation(run, max_length, journal, stop, place).datasets()
    for buffer in model.buffers():
        buffer.data = buffer.to(device)
    model.train()
    return Inputs(
        model=model,
        weights=BeatingWeights(
            opened.weights if adapters is None else adapters.weights(opened.weights), journal
        ),
        base=opened.weights,
        adapters=adapters,
        tokenizer=opened.tokenizer,
        training=datasets.training,
        validation=datasets.validation,
    )


def _add_adapters(run: Run, model: Any, journal: Journal) -> "Adapters | None":
    if run.train.lora is None:
        return None
    # Loads peft, which takes seconds.
    from zero_core.models.adapters import add_lora

    try:
        adapters = add_lora(model, run.train.lora, run.train.seed)
    except ValueError as error:
        raise InvalidSetting(str(error)) from error
    for note in adapters.notes:
        journal.warn(note)
    return adapters


def _usable_length(max_length: int, model: Any, journal: Journal) -> int:
    """``max_length``, or as many positions as the model has: beyond those it has no answer or an error."""
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is None or max_length <= positions:
        return max_length
    journal.warn(
        f"max_length {max_length} is more than the model's {positions} positions; {positions} is used"
    )
    return int(positions)
