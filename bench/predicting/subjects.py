"""The models of the cases, on the meta device, and what is fed to them."""

from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    CLIPConfig,
    CLIPModel,
    LlamaConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from bench.predicting.case import Architecture, Case
from zero_core.sharding.flat_parameter import Weights
from zero_core.training.profiling import Case as MicroBatch
from zero_core.training.profiling import Inputs, Subject
from zero_core.training.recording import scored

VOCABULARY = 8192


class RandomWeights:
    """Values for parameters on the meta device: small, and the same whoever asks."""

    def read(self, name: str, start: int, length: int) -> Tensor:
        return torch.linspace(-0.02, 0.02, length)

    def stored_dtype(self, name: str) -> torch.dtype:
        return torch.float32


def subject(case: Case) -> tuple[Subject, Weights]:
    with init_empty_weights(include_buffers=False):
        model = _build(case.architecture)
    model.train()
    model.config.use_cache = False
    weights: Weights = RandomWeights()
    if case.lora:
        from zero_core.models.adapters import add_lora

        assert case.train.lora is not None
        weights = add_lora(model, case.train.lora, 0).weights(weights)
    if case.architecture == "encoder-decoder":
        return Subject(model, _nothing, _both_sides, _loss, weights.stored_dtype, takes_packed=False), weights
    if case.architecture == "two-tower":
        return Subject(model, _nothing, _pairs, _loss, weights.stored_dtype, takes_packed=False), weights
    return scored(model, weights), weights


def _build(architecture: Architecture) -> PreTrainedModel:
    if architecture == "encoder-decoder":
        config = T5Config(
            vocab_size=VOCABULARY, d_model=512, d_ff=1536, d_kv=64, num_heads=8, num_layers=6,
            dropout_rate=0.0,
        )  # fmt: skip
        config.decoder_start_token_id = 0
        return T5ForConditionalGeneration(config)
    if architecture == "two-tower":
        text = {"vocab_size": VOCABULARY, "hidden_size": 512, "num_hidden_layers": 8, "eos_token_id": 1}
        vision = {"hidden_size": 512, "num_hidden_layers": 8, "image_size": 224, "patch_size": 16}
        layer = {"intermediate_size": 2048, "num_attention_heads": 8}
        return CLIPModel(CLIPConfig(text_config=text | layer, vision_config=vision | layer))
    wide = architecture == "wide decoder"
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=2 * VOCABULARY if wide else VOCABULARY,
            hidden_size=1024 if wide else 512,
            intermediate_size=2816 if wide else 1408,
            num_hidden_layers=6 if wide else 10,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=4096,
        )
    )
    return model


def _nothing(model: PreTrainedModel) -> None:
    pass


def _both_sides(batch: MicroBatch) -> Inputs:
    rows = (len(batch.lengths), batch.lengths[0])
    names = ("input_ids", "attention_mask", "labels")
    return {name: torch.zeros(rows, dtype=torch.int64) for name in names}


def _pairs(batch: MicroBatch) -> Inputs:
    """Texts, and a picture for each."""
    rows = len(batch.lengths)
    texts: Inputs = {
        name: torch.zeros((rows, batch.lengths[0]), dtype=torch.int64)
        for name in ("input_ids", "attention_mask")
    }
    return texts | {"pixel_values": torch.zeros(rows, 3, 224, 224), "return_loss": True}


def _loss(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    answer: Any = model(**inputs)
    loss: Tensor = answer.loss
    return loss


def filled(inputs: Inputs, batch: MicroBatch) -> Inputs:
    """With tokens and places instead of zeros."""
    for name in inputs.keys() & {"input_ids", "targets", "labels"}:
        inputs[name].random_(2, VOCABULARY)
    if "positions" in inputs:
        inputs["positions"].random_(0, sum(batch.lengths))
    if "position_ids" in inputs:
        inputs["position_ids"] = torch.cat([torch.arange(length) for length in batch.lengths])[None]
    elif "attention_mask" in inputs:
        inputs["attention_mask"][:] = 1
        # Some padding, as there nearly always is: without, masks are left out.
        inputs["attention_mask"][0, -1] = 0
    return inputs


def micro_batch(case: Case) -> MicroBatch:
    """Every position but one of each sequence is a target."""
    targets = case.rows * (case.length - 1)
    return MicroBatch((case.length,) * case.rows, case.packed, targets, targets)
