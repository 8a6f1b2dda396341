"""Ranks that follow docs/run-directory.md without training: what they do is written in the job's spec.

``train.script``: ``seconds`` a step; ``save`` every so many steps; and for the first attempt only
``exit_at``, ``hang_at`` or ``outcome`` at a step; ``deaf`` ranks don't stop when asked; with ``prepare``
they prepare files until there is a file ``prepared``; with ``adapter`` that is what comes out.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from zero_core.training.parent_death import PARENT_VARIABLE, die_with_parent


class ScriptedRank:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run = json.loads((directory / "run.json").read_text())
        self.script: dict[str, Any] = self.run["train"].get("script", {})
        self.rank = int(os.environ["RANK"])
        self.first = self.run["epoch"] == 1
        self.stop = threading.Event()

    def main(self) -> int:
        heard = (lambda *_: None) if self.script.get("deaf") else (lambda *_: self.stop.set())
        signal.signal(signal.SIGTERM, heard)
        steps = self.run["train"]["max_steps"]
        resumed = self.run["resume"][0] if self.run["resume"] else None
        first = int(resumed.rsplit("-", 1)[1]) if resumed else 0
        if self.script.get("prepare"):
            self.prepare()
        self.start(steps, first, resumed)
        for step in range(first + 1, steps + 1):
            (self.directory / f"heartbeat-{self.rank}").touch()
            if self.stop.wait(self.script.get("seconds", 0.02)) or not self.all_reach(step):
                return self.stopped(step - 1)
            if self.first and self.misbehave(step):
                return 1
            self.record(step)
        if self.rank == 0:
            self.export(steps)
        return 0

    def prepare(self) -> None:
        self.event(kind="phase", phase="preparing")
        done = 0
        while not (self.directory / "prepared").exists():
            (self.directory / f"heartbeat-{self.rank}").touch()
            done += 1
            self.event(kind="preparing", param="training_file", done=done, total=None)
            self.stop.wait(0.05)

    def start(self, steps: int, step: int, resumed: str | None) -> None:
        self.event(
            kind="start",
            total_steps=steps,
            step=step,
            resumed_from=resumed,
            world_size=int(os.environ["WORLD_SIZE"]),
            examples=100,
            parameters=1000,
            model_state_bytes={"parameters": 4000, "gradients": 4000, "optimizer": 8000},
            device="cpu",
        )
        self.event(kind="phase", phase="training")

    def all_reach(self, step: int) -> bool:
        """What a collective does in real ranks: nobody is a step ahead of the slowest. False on a stop."""
        (self.directory / f"reached-{self.rank}-{step}").touch()
        ranks = range(int(os.environ["WORLD_SIZE"]))
        while not all((self.directory / f"reached-{rank}-{step}").exists() for rank in ranks):
            if self.stop.wait(0.005):
                return False
        return True

    def misbehave(self, step: int) -> bool:
        if step == self.script.get("hang_at") and self.rank == 1:
            threading.Event().wait()
        if step == self.script.get("outcome_at") and self.rank == 0:
            self.outcome(**self.script["outcome"], step=step)
            return True
        return step == self.script.get("exit_at") and self.rank == 1

    def record(self, step: int) -> None:
        memory = {"parameters": {"current": {"cpu": 4000}, "peak": {"cpu": 4000}}}
        line = {"step": step, "time": time.time(), "memory": memory, "resident": 1, "resident_peak": 1}
        self.append(f"rank-{self.rank}.jsonl", line)
        self.event(
            kind="metrics",
            step=step,
            train_loss=1 / step,
            train_accuracy=0.5,
            learning_rate=1e-5,
            grad_norm=1.0,
            tokens=10,
            trained_tokens=10 * step,
            tokens_per_second=100.0,
            seconds=0.1,
            elements_sent=2000,
            skipped=False,
        )
        if step % self.script.get("save", 5) == 0:
            self.checkpoint(step)

    def checkpoint(self, step: int) -> None:
        path = self.directory / f"step-{step}"
        path.mkdir(exist_ok=True)
        self.event(kind="checkpoint", step=step, path=str(path), manifest_sha256="00" * 32, bytes=1)

    def stopped(self, step: int) -> int:
        control = self.directory / "control.json"
        if not control.exists():
            # torchrun ends the ranks that are left when one has died.
            return 1
        action = json.loads(control.read_text())["action"]
        if self.rank == 0:
            if action == "pause" and step > 0:
                self.checkpoint(step)
            self.outcome(status={"pause": "paused", "cancel": "cancelled"}[action], step=step)
        return 0

    def export(self, step: int) -> None:
        target = Path(self.run["export_dir"])
        target.mkdir()
        names = {True: ("adapter_config.json", "adapter_model.safetensors"), False: ("config.json",)}
        for name in names[bool(self.script.get("adapter"))]:
            (target / name).write_text("{}")
        self.event(kind="exported", path=str(target), bytes=2)
        self.outcome(status="succeeded", step=step)

    def outcome(self, **fields: Any) -> None:
        aside = self.directory / ".outcome.json"
        aside.write_text(json.dumps({"reason": None, "message": None, "param": None} | fields))
        aside.replace(self.directory / "outcome.json")

    def event(self, **fields: Any) -> None:
        if self.rank == 0:
            self.append("events.jsonl", {"time": time.time(), **fields})

    def append(self, name: str, line: dict[str, Any]) -> None:
        with (self.directory / name).open("a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    die_with_parent(int(os.environ[PARENT_VARIABLE]))
    sys.exit(ScriptedRank(Path(sys.argv[1])).main())
