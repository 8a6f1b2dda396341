"""``torchrun -m bench.finetuning.trl_rank TASK``: one rank of TRL's SFTTrainer, as its users run it."""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from pydantic import TypeAdapter
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from bench import memory
from bench.finetuning.task import Task


class Clock(TrainerCallback):
    """When each step ended."""

    def __init__(self, must_shard: bool) -> None:
        self.must_shard = must_shard
        self.ends = [0.0]
        self.losses: list[float] = []

    def on_train_begin(self, *_: Any, **said: Any) -> None:
        if self.must_shard and not is_sharded(said["model"]):
            # Accelerate shards on accelerators alone, and trains with DDP elsewhere without a word.
            raise RuntimeError("accelerate sharded nothing: FSDP2 was not used")
        self.ends = [time.monotonic()]

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.monotonic())

    def on_log(self, *_: Any, **said: Any) -> None:
        if "loss" in said["logs"]:
            self.losses.append(said["logs"]["loss"])


def main(path: Path) -> None:
    imports = memory.in_use(torch.device("cpu"))
    task = TypeAdapter(Task).validate_json(path.read_bytes())
    trainer, clock = build(task)
    trainer.train()
    peak = memory.peak(torch.device("cpu"))
    trainer.save_model(str(task.output / "result"))
    rank = trainer.args.process_index
    seen = {
        "ends": clock.ends,
        "losses": clock.losses,
        "peak_bytes": peak,
        "imports_bytes": imports,
        "case": asdict(task.case),
    }
    (task.output / f"rank-{rank}.json").write_text(json.dumps(seen))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def is_sharded(model: torch.nn.Module) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def build(task: Task) -> tuple[SFTTrainer, Clock]:
    case = task.case
    lines = [json.loads(line) for line in task.examples.read_text().splitlines()]
    sharded: dict[str, Any] = {}
    if task.engine == "trl-fsdp2":
        sharded = {
            "fsdp": True,
            "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        }
    config = SFTConfig(
        output_dir=str(task.output / "trainer"),
        per_device_train_batch_size=case.batch_size // 2,
        max_steps=case.steps,
        learning_rate=case.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=0,
        max_grad_norm=1.0,
        weight_decay=0.0,
        train_sampling_strategy="sequential",
        # Examples are cut already; packed without padding, TRL refuses a limit.
        max_length=None,
        padding_free=task.engine == "trl-ddp-padding-free",
        activation_checkpointing=task.checkpointing,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **sharded,
    )
    clock = Clock(must_shard=task.engine == "trl-fsdp2")
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list(lines),
        processing_class=AutoTokenizer.from_pretrained(task.model),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if case.lora else None,
        callbacks=[clock],
    )
    return trainer, clock


if __name__ == "__main__":
    main(Path(sys.argv[1]))
