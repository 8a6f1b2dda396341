"""Which objective a run's method is."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from zero_core.config.train import TrainConfig
from zero_core.training.methods.dpo import DirectPreference
from zero_core.training.methods.objective import Objective
from zero_core.training.methods.supervised import Supervised

Start = Callable[[], NDArray[np.float32]]
"""(samples, sequences): log-probability of each sequence under the starting model. Collective."""


def objective(train: TrainConfig, start: Start) -> Objective:
    """``start`` is asked by methods alone that need it."""
    if train.method == "dpo":
        return DirectPreference(train.dpo, start())
    return Supervised()
