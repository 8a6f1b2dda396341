"""A job as people read it, and what a command that waited for one says when it did not succeed."""

import sys
from collections.abc import Iterable

from shardyard.cli.output import moment, print_fields, print_json
from shardyard.client import Json
from shardyard.errors import JobFailed


def print_job(job: Json, as_json: bool, *, known: bool = False) -> None:
    """``known``: warnings were shown already, and why it failed is about to be said on stderr."""
    if as_json:
        print_json(job)
        return
    fields: list[tuple[str, object]] = [
        ("job", job["id"]),
        ("status", job["status"]),
        ("phase", job["phase"]),
        ("model", job["model"]),
        ("method", method_of(job)),
        ("step", step_of(job)),
        ("attempts", job["attempts"]),
        ("created", moment(job["created_at"])),
        ("finished", moment(job["finished_at"])),
        ("fine-tuned model", job["fine_tuned_model"]),
        ("results", ", ".join(job["result_files"]) or None),
    ]
    if not known:
        error = job["error"] or {}
        fields += [("reason", job["reason"]), ("error", error.get("message"))]
        fields += [("warning", warning) for warning in job["warnings"]]
    print_fields(fields)


def require_success(job: Json) -> None:
    if job["status"] != "succeeded":
        error = job["error"] or {}
        message = error.get("message")
        why = f"{message.rstrip('.')} ({job['reason']})" if message and job["reason"] else None
        raise JobFailed(
            f"{job['id']} {job['status']}: {why or message or job['reason'] or 'no reason given'}. "
            f"`shardyard jobs logs {job['id']}` has what it printed."
        )


def print_warnings(warnings: Iterable[str]) -> None:
    """On stderr: what a command prints for others to read stays free of them."""
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)


def step_of(job: Json) -> str:
    progress = job["progress"]
    return f"{progress['step']}/{progress['total_steps'] or '?'}"


def method_of(job: Json) -> str:
    """``supervised``, or ``dpo, LoRA of rank 16 on nf4``."""
    kind: str = job["method"]["type"]
    lora = job["resolved_config"]["training"].get("lora")
    if not lora:
        return kind
    base = f" on {lora['quantization']}" if lora.get("quantization") else ""
    merged = ", merged" if lora.get("merge") else ""
    return f"{kind}, LoRA of rank {lora['r']}{base}{merged}"
