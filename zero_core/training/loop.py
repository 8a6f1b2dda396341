"""The training loop. What it does depends on the plan only in speed and memory.

Order of a step: train, report, evaluate if due, checkpoint if due. A run that is stopped or dies goes on
from its newest checkpoint as if nothing had happened: the sample cursor is ``step * train_batch_size``.
"""

import math
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import get_scheduler

from zero_core.checkpoints import checkpoint
from zero_core.checkpoints.checkpoint import Saved
from zero_core.checkpoints.export import export
from zero_core.config.zero import Precision
from zero_core.data.batches import collate, epoch_of, global_batch, split
from zero_core.engine import StepReport, ZeroEngine
from zero_core.errors import CheckpointDamaged
from zero_core.models.carry_over import carry_over
from zero_core.planner import model_state_bytes
from zero_core.training.evaluation import Evaluation, evaluate
from zero_core.training.inputs import Inputs, load_inputs
from zero_core.training.journal import Journal
from zero_core.training.loss import to_device, token_loss
from zero_core.training.run import Outcome, Run, StopRequest
from zero_core.training.stopping import Stopped, StopVote

NON_FINITE_LIMIT = 3
"""Steps in a row with a non-finite gradient after which a run is not going to recover."""


class NonFiniteLoss(ArithmeticError):
    def __init__(self, step: int, lr: float) -> None:
        super().__init__(
            f"the gradient was not finite for {NON_FINITE_LIMIT} steps in a row up to step {step}, at "
            f"learning rate {lr:.2g}: lower learning_rate, add warmup_steps, or check the training file"
        )
        self.step = step


@dataclass
class Progress:
    """What a checkpoint keeps beside the engine's own state."""

    trained_tokens: int = 0
    non_finite_steps: int = 0
    last: dict[str, float | None] = field(default_factory=dict)
    """Newest training and validation figures, for the checkpoint's row."""


def usable_precision(wanted: Precision | Literal["auto"], device: torch.device) -> Precision:
    """What ``auto`` comes to on ``device``."""
    if wanted != "auto":
        return wanted
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"


class TrainingLoop:
    def __init__(self, run: Run, device: torch.device, journal: Journal, stop: StopRequest) -> None:
        self._run = run
        self._train = run.train
        self._journal = journal
        self._device = device
        self._inputs: Inputs = load_inputs(run, device, journal)
        self._total_steps = self._train.total_steps(len(self._inputs.training))
        self._precision = usable_precision(self._train.precision, device)
        self._engine = self._build_engine()
        self._rank = self._engine.communicator.rank
        self._world_size = self._engine.communicator.world_size
        self._vote = StopVote(stop, self._engine.communicator)
        self._progress = Progress()
        self._checkpoints: list[Path] = []
        """Oldest first."""

    def _build_engine(self) -> ZeroEngine:
        torch.manual_seed(self._train.seed)
        world_size = torch.distributed.get_world_size()
        scheduler = get_scheduler(
            self._train.lr_scheduler_type,
            optimizer=torch.optim.SGD([torch.zeros(1)], lr=1.0),
            num_warmup_steps=self._train.warmup_steps,
            num_training_steps=self._total_steps,
        )
        return ZeroEngine(
            self._inputs.model,
            self._train.zero_config(world_size, self._precision),
            self._train.optimizer_config(),
            lr_schedule=scheduler.lr_lambdas[0],
            weights=self._inputs.weights,
            device=self._device,
        )

    def run(self) -> Outcome:
        try:
            self._resume()
            self._train_to_the_end()
            self._export()
        except Stopped as stopped:
            return self._stop(stopped)
        return Outcome("succeeded", step=self._engine.steps)

    # Start.

    def _resume(self) -> None:
        """From the newest good checkpoint, else from the base model."""
        resumed_from = None
        self._checkpoints = list(reversed(self._run.resume))
        for path in self._run.resume:
            try:
                state = checkpoint.load(self._engine, path)
            except CheckpointDamaged as error:
                self._journal.warn(f"checkpoint {path.name} is not used: {error}")
                self._checkpoints.remove(path)
                continue
            self._progress = Progress(**state)
            resumed_from = path
            break
        parameters = self._engine.trainable_elements
        self._journal.event(
            "start",
            total_steps=self._total_steps,
            step=self._engine.steps,
            resumed_from=str(resumed_from) if resumed_from else None,
            world_size=self._world_size,
            examples=len(self._inputs.training),
            parameters=parameters,
            model_state_bytes=model_state_bytes(
                parameters, self._world_size, self._train.zero_stage, self._precision
            ),
            device=self._device.type,
        )

    def _train_to_the_end(self) -> None:
        if self._engine.steps == 0 and self._train.eval_on_start:
            self._evaluate()
        while self._engine.steps < self._total_steps:
            self._vote.check()
            self._step()
            if self._due(self._train.eval_steps):
                self._evaluate()
            if self._due(self._train.save_steps):
                self._save()

    # One step.

    def _step(self) -> None:
        self._journal.phase("training")
        started = time.monotonic()
        self._engine.start_measuring()
        batch = global_batch(self._inputs.training, self._engine.steps, self._train)
        sums = torch.zeros(2, dtype=torch.float64)
        report = None
        for ranks in split(batch, self._world_size, self._train.per_device_train_batch_size):
            micro_batch = to_device(collate(ranks[self._rank], self._inputs.pad_id), self._device)
            loss = token_loss(self._engine, micro_batch)
            self._engine.backward(loss.mean, loss.tokens)
            report = self._engine.step()
            sums += torch.tensor([loss.total, loss.correct], dtype=torch.float64)
            self._journal.beat()
        assert report is not None
        tokens = sum(len(example) for example in batch)
        self._progress.trained_tokens += tokens
        self._report(report, self._engine.communicator.agree(sums), tokens, time.monotonic() - started)

    def _report(self, report: StepReport, sums: torch.Tensor, tokens: int, seconds: float) -> None:
        targets = report.target_tokens or 1.0
        self._progress.last |= {
            "train_loss": sums[0].item() / targets,
            "train_accuracy": sums[1].item() / targets,
        }
        self._journal.event(
            "metrics",
            step=report.step,
            learning_rate=report.lr,
            grad_norm=report.grad_norm,
            tokens=int(report.target_tokens),
            trained_tokens=self._progress.trained_tokens,
            tokens_per_second=tokens / seconds,
            seconds=seconds,
            elements_sent=report.elements_sent,
            skipped=report.skipped,
            train_loss=self._progress.last["train_loss"],
            train_accuracy=self._progress.last["train_accuracy"],
        )
        self._journal.telemetry(report.step, self._engine.memory(), self._engine.resident())
        self._progress.non_finite_steps = self._progress.non_finite_steps + 1 if report.skipped else 0
        scaler = self._engine.scaler
        if self._progress.non_finite_steps >= NON_FINITE_LIMIT and (scaler is None or scaler.exhausted):
            raise NonFiniteLoss(report.step, report.lr)

    def _due(self, every: int | None) -> bool:
        """After a step: every so many, or at an epoch's end; always at the run's end."""
        step = self._engine.steps
        if step == self._total_steps:
            return True
        if every is not None:
            return step % every == 0
        size, examples = self._train.train_batch_size, len(self._inputs.training)
        return epoch_of(step * size, examples) > epoch_of((step - 1) * size, examples)

    # Between steps.

    def _evaluate(self) -> None:
        if self._inputs.validation is None:
            return
        self._journal.phase("evaluating")
        result: Evaluation = evaluate(
            self._engine,
            self._inputs.validation,
            self._train.per_device_eval_batch_size,
            self._inputs.pad_id,
            between_batches=self._between_batches,
        )
        self._progress.last |= {"valid_loss": result.loss, "valid_accuracy": result.accuracy}
        self._journal.event(
            "evaluation", step=self._engine.steps, valid_loss=result.loss, valid_accuracy=result.accuracy
        )

    def _between_batches(self) -> None:
        self._journal.beat()
        self._vote.check()

    def _save(self) -> None:
        step = self._engine.steps
        path = self._run.directory / f"step-{step}"
        self._journal.phase("checkpointing")
        state: dict[str, Any] = {
            "trained_tokens": self._progress.trained_tokens,
            "non_finite_steps": self._progress.non_finite_steps,
            "last": {k: v if v is None or math.isfinite(v) else None for k, v in self._progress.last.items()},
        }
        saved: Saved | None = checkpoint.save(self._engine, path, state)
        self._journal.beat()
        self._checkpoints.append(path)
        if saved is not None:
            self._journal.event(
                "checkpoint",
                step=step,
                path=str(path),
                manifest_sha256=saved.manifest_sha256,
                bytes=saved.bytes,
                **self._progress.last,
            )
        self._prune()

    def _prune(self) -> None:
        """Oldest first, once a newer one is complete on disk."""
        while len(self._checkpoints) > self._train.save_total_limit:
            path = self._checkpoints.pop(0)
            if self._rank == 0:
                shutil.rmtree(path, ignore_errors=True)
                self._journal.event("pruned", path=str(path))

    # End.

    def _export(self) -> None:
        self._journal.phase("exporting")
        self._vote.check()
        base, template = self._run.model_path, self._train.chat_template
        exported = export(
            self._engine,
            self._run.export_dir,
            self._inputs.weights,
            lambda directory: carry_over(base, directory, template),
        )
        self._journal.beat()
        if exported is not None:
            self._journal.event("exported", path=str(exported.path), bytes=exported.bytes)

    def _stop(self, stopped: Stopped) -> Outcome:
        step = self._engine.steps
        if stopped.action == "cancel":
            return Outcome("cancelled", "cancelled_by_user", step=step)
        newest = self._checkpoints[-1].name if self._checkpoints else None
        if step > 0 and newest != f"step-{step}":
            self._save()
        return Outcome("paused", "paused_by_user", step=step)
