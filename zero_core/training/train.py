"""One rank of an attempt (``python -m zero_core.train DIRECTORY``). Wires the parts; ``loop`` trains."""

import argparse
import errno
import os
import resource
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from transformers.utils import logging

from zero_core.config.checks import InvalidSetting
from zero_core.data.formats import InvalidFile
from zero_core.errors import PeerFailed, PeerGone, PeerSilent
from zero_core.models.model_files import InvalidModel
from zero_core.training.journal import Journal
from zero_core.training.loop import NonFiniteLoss, attempt
from zero_core.training.out_of_memory import OutOfMemory, is_out_of_memory
from zero_core.training.parent_death import PARENT_VARIABLE, die_with_parent
from zero_core.training.run import Outcome, Run, StopRequest

PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
"""What gloo says on a rank whose peer died: never the first cause."""


def main() -> int:
    parser = argparse.ArgumentParser(description="One rank of a training attempt; started by torchrun.")
    parser.add_argument("directory", type=Path, help="the attempt's directory, with run.json")
    directory: Path = parser.parse_args().directory.resolve()
    die_with_parent(int(os.environ.get(PARENT_VARIABLE, os.getppid())))
    logging.disable_progress_bar()
    stop = StopRequest(directory)
    try:
        run = Run.read(directory)
        if run.memory_limit is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (run.memory_limit, run.memory_limit))
        outcome = train(run, stop)
    except Exception as error:
        traceback.print_exc()
        cause = first_cause(error)
        if cause is not None:
            cause.write(directory)
        return 1
    if outcome is not None:
        outcome.write(directory)
    return 0


def train(run: Run, stop: StopRequest) -> Outcome | None:
    """Run the attempt on this rank; rank 0 alone gets the outcome."""
    device = _device()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=run.hang_seconds))
    rank = dist.get_rank()
    outcome = attempt(run, device, Journal(run.directory, rank), stop)
    dist.destroy_process_group()
    return outcome if rank == 0 else None


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


def first_cause(error: Exception) -> Outcome | None:
    """What this rank blames, or None where another rank's end is the cause."""
    message = f"{type(error).__name__}: {error}"
    text = str(error)
    if isinstance(error, PeerFailed | PeerGone) or any(sign in text for sign in PEER_GONE):
        return None
    if isinstance(error, InvalidFile):
        return Outcome("failed", error.code, text, error.param)
    if isinstance(error, InvalidModel):
        return Outcome("failed", error.code, text, "model")
    if isinstance(error, InvalidSetting):
        # Of LoRA alone: everything else is checked before a model is there.
        return Outcome("failed", error.code, f"training.{text}", "training.lora")
    if isinstance(error, NonFiniteLoss):
        return Outcome("failed", "nan_loss", text, step=error.step)
    if is_out_of_memory(error):
        step, when = (error.step, text) if isinstance(error, OutOfMemory) else (0, "before the first step")
        return Outcome("failed", "oom", f"out of memory on rank {_rank()} {when}", step=step)
    if getattr(error, "errno", None) == errno.ENOSPC or "No space left on device" in text:
        return Outcome("failed", "disk_full", message)
    if isinstance(error, PeerSilent) or "Timed out waiting" in text:
        return Outcome("failed", "hung", message)
    return Outcome("failed", "crashed", message)
