"""Supervised fine-tuning: the mean negative log-likelihood of the target tokens (nats)."""

from collections.abc import Mapping

from zero_core.data.batches import Batch
from zero_core.models.token_scores import TokenScores
from zero_core.training.methods.objective import Loss


class Supervised:
    sums: tuple[str, ...] = ("negative_log_likelihood", "correct")

    def loss(self, scores: TokenScores, batch: Batch) -> Loss:
        total = -scores.log_probs.sum()
        if not batch.sequences:
            return Loss(total * 0.0, 0, (0.0, 0.0))
        tokens = len(batch.targets)
        return Loss(total / tokens, tokens, (total.item(), float(scores.correct.sum())))

    def metrics(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        tokens = weight or 1.0
        return {"loss": sums["negative_log_likelihood"] / tokens, "accuracy": sums["correct"] / tokens}
