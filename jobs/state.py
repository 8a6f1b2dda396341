"""The life of a job, as one table. Pure: nothing here touches a database or a clock."""

from enum import StrEnum


class State(StrEnum):
    """What a job is. Written by the lease owner, or by the API where nobody has claimed the job."""

    VALIDATING = "validating"
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    CANCELLING = "cancelling"
    RETRY_WAIT = "retry_wait"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Desired(StrEnum):
    """What the user wants. Written by the API alone."""

    RUN = "run"
    PAUSE = "pause"
    CANCEL = "cancel"


class Phase(StrEnum):
    """What a live attempt is doing."""

    STARTING = "starting"
    PREPARING = "preparing"
    REFERENCING = "referencing"
    TRAINING = "training"
    EVALUATING = "evaluating"
    CHECKPOINTING = "checkpointing"
    EXPORTING = "exporting"
    PAUSING = "pausing"
    CANCELLING = "cancelling"
    RECOVERING = "recovering"


class Reason(StrEnum):
    """Why an attempt or a job ended, or waits. Stable: clients branch on these."""

    OOM = "oom"
    NAN_LOSS = "nan_loss"
    INVALID_TRAINING_FILE = "invalid_training_file"
    INVALID_VALIDATION_FILE = "invalid_validation_file"
    INVALID_MODEL = "invalid_model"
    INVALID_PARAMETER = "invalid_parameter"
    LOST = "lost"
    HUNG = "hung"
    DISK_FULL = "disk_full"
    CRASHED = "crashed"
    MAX_ATTEMPTS = "max_attempts"
    CANCELLED_BY_USER = "cancelled_by_user"
    PAUSED_BY_USER = "paused_by_user"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.VALIDATING: frozenset({State.QUEUED, State.FAILED, State.CANCELLED}),
    State.QUEUED: frozenset({State.STARTING, State.PAUSED, State.CANCELLED}),
    State.STARTING: frozenset({State.RUNNING, State.RETRY_WAIT, State.FAILED, State.CANCELLING}),
    State.RUNNING: frozenset(
        {State.SUCCEEDED, State.FAILED, State.PAUSING, State.CANCELLING, State.RETRY_WAIT}
    ),
    State.PAUSING: frozenset({State.PAUSED, State.SUCCEEDED, State.CANCELLING, State.RETRY_WAIT}),
    State.CANCELLING: frozenset({State.CANCELLED}),
    State.PAUSED: frozenset({State.QUEUED, State.CANCELLED}),
    State.RETRY_WAIT: frozenset({State.QUEUED, State.PAUSED, State.FAILED, State.CANCELLED}),
    State.SUCCEEDED: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
}

TERMINAL = frozenset(state for state, following in TRANSITIONS.items() if not following)
"""States that never change."""

LIVE = frozenset({State.STARTING, State.RUNNING, State.PAUSING, State.CANCELLING})
"""States in which an attempt exists: its writes are allowed, its lease is watched."""

UNCLAIMED = frozenset(State) - TERMINAL - LIVE
"""States in which nobody holds the job, so the API may move it."""

RETRYABLE = frozenset({Reason.LOST, Reason.HUNG, Reason.CRASHED})
"""Reasons after which another attempt can do better."""

PUBLIC: dict[State, str] = {
    State.VALIDATING: "validating_files",
    State.QUEUED: "queued",
    State.STARTING: "queued",
    State.RUNNING: "running",
    State.PAUSING: "running",
    State.PAUSED: "paused",
    State.CANCELLING: "running",
    State.RETRY_WAIT: "queued",
    State.SUCCEEDED: "succeeded",
    State.FAILED: "failed",
    State.CANCELLED: "cancelled",
}
"""The ``status`` that OpenAI's clients read."""


class IllegalTransition(ValueError):
    """A state change that the table does not have: a bug of ours."""


def check_transition(current: State, following: State) -> None:
    if following not in TRANSITIONS[current]:
        raise IllegalTransition(f"{current} -> {following} is not in the table")
