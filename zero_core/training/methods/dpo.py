"""Direct preference optimization (Rafailov et al. 2023, equation 7).

Of a pair with the log-probabilities of both answers under the model and under the model that training
started from, the implicit reward of an answer is r = beta (log p - log p_start), and the loss is
-log sigmoid(r_chosen - r_rejected), its mean over the pairs of the global batch.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import logsigmoid

from zero_core.config.dpo import DpoConfig
from zero_core.data.batches import Batch
from zero_core.models.token_scores import TokenScores
from zero_core.training.methods.objective import Loss


class DirectPreference:
    sums: tuple[str, ...] = ("loss", "chosen", "rejected", "preferred")

    def __init__(self, config: DpoConfig, start: NDArray[np.float32]) -> None:
        """``start`` (pairs, 2): log-probabilities of the chosen and the rejected answers at the start."""
        self._beta = config.beta
        self._start = torch.from_numpy(start)

    def loss(self, scores: TokenScores, batch: Batch) -> Loss:
        if not batch.sequences:
            return Loss(scores.log_probs.sum() * 0.0, 0, (0.0,) * len(self.sums))
        answers = scores.log_probs.new_zeros(batch.sequences)
        answers = answers.index_add(0, batch.sequence_of, scores.log_probs).view(-1, 2)
        start = self._start[[item.index for item in batch.items]].to(answers.device)
        rewards = self._beta * (answers - start)
        margins = rewards[:, 0] - rewards[:, 1]
        losses = -logsigmoid(margins)
        chosen, rejected = rewards.detach().sum(0).tolist()
        sums = (losses.detach().sum().item(), chosen, rejected, float((margins > 0).sum()))
        return Loss(losses.mean(), len(losses), sums)

    def metrics(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        pairs = weight or 1.0
        return {
            "loss": sums["loss"] / pairs,
            "accuracy": sums["preferred"] / pairs,
            "rewards/chosen": sums["chosen"] / pairs,
            "rewards/rejected": sums["rejected"] / pairs,
            "rewards/margins": (sums["chosen"] - sums["rejected"]) / pairs,
            "rewards/accuracies": sums["preferred"] / pairs,
        }
