from typing import Any

import pytest

from worker.run_directory import Outcome
from worker.verdict import Evidence, decide

FAILED = {"status": "failed"}
KILLED = "failed (exitcode: -9) local_rank: 1 (pid: 4711) of binary: python"


@pytest.mark.parametrize(
    ("outcome", "traces", "expected"),
    [
        ({"status": "succeeded"}, {}, ("succeeded", None)),
        ({"status": "paused"}, {"stopping": True}, ("paused", "paused_by_user")),
        ({"status": "cancelled"}, {"stopping": True}, ("cancelled", "cancelled_by_user")),
        ({"status": "succeeded"}, {"exit_code": 1}, ("succeeded", None)),
        (FAILED | {"reason": "nan_loss"}, {}, ("failed", "nan_loss")),
        (FAILED | {"reason": "invalid_parameter"}, {}, ("failed", "invalid_parameter")),
        (FAILED | {"reason": "oom"}, {"hung": True}, ("failed", "oom")),
        (FAILED | {"reason": "a newer engine's"}, {}, ("failed", "crashed")),
        (FAILED | {"reason": "crashed"}, {"oom_killed": True, "log_tail": KILLED}, ("failed", "oom")),
        (FAILED | {"reason": "crashed"}, {"oom_killed": True}, ("failed", "crashed")),
        (FAILED | {"reason": "crashed"}, {}, ("failed", "crashed")),
        (None, {}, ("failed", "crashed")),
        (None, {"hung": True}, ("failed", "hung")),
        (None, {"oom_killed": True, "log_tail": KILLED}, ("failed", "oom")),
        (None, {"oom_killed": True, "exit_code": -9}, ("failed", "oom")),
        (None, {"oom_killed": True}, ("failed", "crashed")),
        (None, {"log_tail": KILLED}, ("failed", "crashed")),
        (None, {"log_tail": "torch.OutOfMemoryError: CUDA out of memory"}, ("failed", "oom")),
        (None, {"log_tail": "DefaultCPUAllocator: can't allocate memory"}, ("failed", "oom")),
        (None, {"log_tail": "OSError: [Errno 28] No space left on device"}, ("failed", "disk_full")),
        (None, {"stopping": True, "exit_code": None}, ("retry_wait", None)),
    ],
)
def test_verdict(
    outcome: dict[str, Any] | None, traces: dict[str, Any], expected: tuple[str, str | None]
) -> None:
    evidence = Evidence(
        Outcome.model_validate(outcome) if outcome else None, **{"exit_code": 0, "log_tail": ""} | traces
    )
    ending = decide(evidence)
    assert (ending.state, ending.reason) == expected
    assert ending.blame == (ending.state != "retry_wait")
    assert ending.state != "failed" or outcome is not None or ending.message


def test_the_ranks_own_words_reach_the_user() -> None:
    outcome = Outcome(status="failed", reason="invalid_model", message="no tokenizer", param="model")
    ending = decide(Evidence(outcome, 1, ""))
    assert (ending.message, ending.param, ending.exit_code) == ("no tokenizer", "model", 1)
