"""Shardyard's own engine."""

from torch import Tensor, nn

from bench.engines import ADAMW, Setup, Step, Train
from zero_core import AdamWConfig, ZeroConfig, ZeroEngine


def build(model: nn.Module, setup: Setup) -> Train:
    engine = ZeroEngine(model, ZeroConfig(stage=setup.stage, precision=setup.precision), AdamWConfig(**ADAMW))

    def train(tokens: Tensor) -> Step:
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        report = engine.step()
        assert report is not None, "one micro-batch makes a step"
        return Step(loss.detach(), report.elements_sent)

    return train
