"""Shapes of the models that are measured: Llama decoders with random weights, equal on every rank."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Shape:
    hidden: int
    layers: int
    feed_forward: int
    vocabulary: int
    heads: int

    @property
    def block_elements(self) -> int:
        """Four attention projections, three of the gated feed-forward, two norms."""
        return 4 * self.hidden**2 + 3 * self.hidden * self.feed_forward + 2 * self.hidden

    @property
    def root_elements(self) -> int:
        """Embedding, untied output projection and last norm."""
        return 2 * self.vocabulary * self.hidden + self.hidden

    @property
    def elements(self) -> int:
        return self.layers * self.block_elements + self.root_elements

    @property
    def largest_unit(self) -> int:
        """Elements of the largest group that is gathered or reduced at once: a block or a table."""
        return max(self.block_elements, self.vocabulary * self.hidden)


SHAPES: dict[str, Shape] = {
    "base": Shape(hidden=1024, layers=12, feed_forward=2816, vocabulary=16384, heads=8),
    "many-small": Shape(hidden=256, layers=24, feed_forward=704, vocabulary=16384, heads=8),
    "wide": Shape(hidden=2048, layers=4, feed_forward=5632, vocabulary=16384, heads=8),
    "tiny": Shape(hidden=64, layers=2, feed_forward=176, vocabulary=256, heads=8),
    "1.5B": Shape(hidden=2048, layers=28, feed_forward=5632, vocabulary=32000, heads=16),
    "7B": Shape(hidden=4096, layers=32, feed_forward=11008, vocabulary=32000, heads=32),
}


def build_model(shape: Shape, sequence_length: int) -> "nn.Module":
    """On torch's current default device, in fp32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=shape.hidden,
            intermediate_size=shape.feed_forward,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            vocab_size=shape.vocabulary,
            max_position_embeddings=sequence_length,
            use_cache=False,
        )
    )


def blocks(model: "nn.Module") -> list["nn.Module"]:
    """The decoder blocks, which every engine that shards parameters takes as its units."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    return [module for module in model.modules() if isinstance(module, LlamaDecoderLayer)]
