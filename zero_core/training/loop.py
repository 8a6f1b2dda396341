"""The training loop. What it does depends on the plan only in speed and memory.

Order of a step: train, report, evaluate if due, checkpoint if due. A run that is stopped or dies goes on
from its newest checkpoint as if nothing had happened: which samples a step takes follows from its number.
"""

import math
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import get_scheduler

from zero_core.checkpoints import checkpoint
from zero_core.checkpoints.checkpoint import Saved
from zero_core.checkpoints.manifest import Manifest
from zero_core.config.zero import Precision
from zero_core.data.batches import global_batch, samples_of, steps_per_epoch
from zero_core.data.dataset import Dataset
from zero_core.engine import StepReport, ZeroEngine
from zero_core.errors import CheckpointDamaged
from zero_core.models.token_scores import TokenScorer
from zero_core.planner.formulas import model_state_bytes
from zero_core.training.evaluation import evaluate
from zero_core.training.inputs import Inputs, load_inputs
from zero_core.training.journal import Journal
from zero_core.training.methods.objective import Objective
from zero_core.training.methods.table import objective
from zero_core.training.micro_batches import MicroBatches, score
from zero_core.training.out_of_memory import OutOfMemory, is_out_of_memory
from zero_core.training.packing import packs
from zero_core.training.result import write_result
from zero_core.training.run import Outcome, Run, StopRequest
from zero_core.training.samples import answer, prompts
from zero_core.training.starting_model import log_probs_at_start
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


def _precision(run: Run, device: torch.device) -> Precision:
    """What ``auto`` comes to: what the run began with, else what ``device`` computes in."""
    if run.train.precision != "auto":
        return run.train.precision
    for path in run.resume:
        try:
            return Manifest.read(path).precision
        except CheckpointDamaged:
            continue
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "fp32"


def _named(kind: Literal["train", "valid"], metrics: dict[str, float]) -> dict[str, float]:
    """``train_loss`` and ``train_accuracy``; of validation all names begin so."""
    return {
        f"{kind}_{name}" if kind == "valid" or name in ("loss", "accuracy") else name: value
        for name, value in metrics.items()
    }


class TrainingLoop:
    def __init__(self, run: Run, device: torch.device, journal: Journal, stop: StopRequest) -> None:
        self._run = run
        self._train = run.train
        self._journal = journal
        self._device = device
        self._inputs: Inputs = load_inputs(run, device, journal, stop)
        self._total_steps = self._train.total_steps(len(self._inputs.training))
        self._precision = _precision(run, device)
        self._engine = self._build_engine()
        self._rank = self._engine.communicator.rank
        self._world_size = self._engine.communicator.world_size
        self._vote = StopVote(stop, self._engine.communicator)
        self._progress = Progress()
        self._checkpoints: list[Path] = []
        """Oldest first."""

    def _build_engine(self) -> ZeroEngine:
        torch.manual_seed(self._train.seed)
        scheduler = get_scheduler(
            self._train.lr_scheduler_type,
            optimizer=torch.optim.SGD([torch.zeros(1)], lr=1.0),
            num_warmup_steps=self._train.warmup_steps,
            num_training_steps=self._total_steps,
        )
        TokenScorer(self._inputs.model, self._train.logits_bytes)
        return ZeroEngine(
            self._inputs.model,
            self._train.zero_config(
                torch.distributed.get_world_size(), self._precision, str(self._run.directory)
            ),
            self._train.optimizer_config(),
            lr_schedule=scheduler.lr_lambdas[0],
            weights=self._inputs.weights,
            device=self._device,
        )

    def run(self) -> Outcome:
        try:
            self._prepare()
            self._resume()
            self._train_to_the_end()
            self._export()
        except Stopped as stopped:
            return self._stop(stopped)
        except Exception as error:
            if is_out_of_memory(error):
                raise OutOfMemory(self._engine.steps, self._when()) from error
            raise
        return Outcome("succeeded", step=self._engine.steps)

    def _when(self) -> str:
        phase, steps = self._journal.current_phase, self._engine.steps
        return f"in step {steps + 1}" if phase == "training" else f"while {phase} after step {steps}"

    # Start.

    def _prepare(self) -> None:
        """What needs the starting model, before a checkpoint is loaded over it."""
        packed = self._train.packing and packs(self._engine, self._inputs.model, self._inputs.vocabulary)
        if self._train.packing and not packed:
            self._journal.warn("packing: this model mixes packed sequences, so they are padded instead")
        self._micro_batches = MicroBatches(self._engine, self._train, self._inputs.pad_id, packed=packed)
        self._objective = self._objective_on(self._inputs.training)
        validation = self._inputs.validation
        self._validation = None if validation is None else self._objective_on(validation)

    def _objective_on(self, dataset: Dataset) -> Objective:
        def at_start() -> NDArray[np.float32]:
            self._journal.phase("referencing")
            kept = self._run.directory.parent
            return log_probs_at_start(self._engine, dataset, self._micro_batches, kept, self._between_batches)

        return objective(self._train, at_start)

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
                parameters,
                self._world_size,
                self._engine.config.stage,
                self._precision,
                self._engine.frozen_elements,
            ),
            resident_peak=self._engine.resident().peak,
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
        items = global_batch(self._inputs.training, self._engine.steps, self._train)
        mine = self._micro_batches.of_step(items)
        self._engine.accumulate(len(mine))
        sums = torch.zeros(1 + len(self._objective.sums), dtype=torch.float64)
        report = None
        for some in mine:
            batch = self._micro_batches.collate(some)
            loss = self._objective.loss(score(self._engine, batch), batch)
            self._engine.backward(loss.mean, loss.weight)
            report = self._engine.step()
            sums += torch.tensor([batch.slots, *loss.sums], dtype=torch.float64)
            self._journal.beat()
        assert report is not None
        slots, *totals = self._engine.communicator.agree(sums).tolist()
        metrics = self._objective.metrics(
            dict(zip(self._objective.sums, totals, strict=True)), report.target_tokens
        )
        tokens = sum(item.length for item in items)
        self._progress.trained_tokens += tokens
        seconds = time.monotonic() - started
        self._report(report, metrics, tokens, tokens / seconds, seconds, tokens / slots)

    def _report(
        self,
        report: StepReport,
        metrics: dict[str, float],
        tokens: int,
        tokens_per_second: float,
        seconds: float,
        occupancy: float,
    ) -> None:
        named = _named("train", metrics)
        self._progress.last |= {name: named[name] for name in ("train_loss", "train_accuracy")}
        self._journal.event(
            "metrics",
            step=report.step,
            epoch=self._epoch(report.step),
            learning_rate=report.lr,
            grad_norm=report.grad_norm,
            tokens=tokens,
            trained_tokens=self._progress.trained_tokens,
            tokens_per_second=tokens_per_second,
            occupancy=occupancy,
            seconds=seconds,
            elements_sent=report.elements_sent,
            skipped=report.skipped,
            **named,
        )
        self._journal.telemetry(report.step, self._engine.memory(), self._engine.resident())
        self._progress.non_finite_steps = self._progress.non_finite_steps + 1 if report.skipped else 0
        scaler = self._engine.scaler
        if self._progress.non_finite_steps >= NON_FINITE_LIMIT and (scaler is None or scaler.exhausted):
            raise NonFiniteLoss(report.step, report.lr)

    def _epoch(self, step: int) -> float:
        """Passes over the training set once ``step`` steps are done."""
        examples = len(self._inputs.training)
        return samples_of(step - 1, examples, self._train).stop / examples

    def _due(self, every: int | None) -> bool:
        """After a step: every so many, or at an epoch's end; always at the run's end."""
        step = self._engine.steps
        each = every or steps_per_epoch(len(self._inputs.training), self._train)
        return step == self._total_steps or step % each == 0

    # Between steps.

    def _evaluate(self) -> None:
        if self._inputs.validation is None or self._validation is None:
            return
        self._journal.phase("evaluating")
        named = _named(
            "valid",
            evaluate(
                self._engine,
                self._inputs.validation,
                self._validation,
                self._micro_batches,
                self._between_batches,
            ),
        )
        self._progress.last |= {name: named[name] for name in ("valid_loss", "valid_accuracy")}
        self._journal.event("evaluation", step=self._engine.steps, **named)
        self._sample()

    def _sample(self) -> None:
        if not self._train.eval_samples or self._inputs.validation is None:
            return
        longest = self._train.eval_sample_tokens
        asked = prompts(self._inputs.validation, self._train.eval_samples, longest)
        for said in answer(self._engine, self._inputs.model, self._inputs.tokenizer, asked, longest):
            self._journal.event("sample", step=self._engine.steps, **asdict(said))
        self._between_batches()

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
        exported = write_result(self._engine, self._inputs, self._run, self._journal)
        self._journal.beat()
        if exported is not None:
            self._journal.event("exported", path=str(exported.path), bytes=exported.bytes)

    def _stop(self, stopped: Stopped) -> Outcome:
        step = self._engine.steps
        newest = self._checkpoints[-1].name if self._checkpoints else None
        if stopped.action == "pause" and step > 0 and newest != f"step-{step}":
            self._save()
        return stopped.outcome(step)


def attempt(run: Run, device: torch.device, journal: Journal, stop: StopRequest) -> Outcome:
    """Train until the run's end, or until it is asked to stop. Collective."""
    try:
        loop = TrainingLoop(run, device, journal, stop)
    except Stopped as stopped:  # While the files were prepared.
        return stopped.outcome(step=0)
    return loop.run()
