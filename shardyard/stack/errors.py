"""What keeps the embedded stack from running."""

from shardyard.errors import ShardyardError


class StackError(ShardyardError):
    """The message says what is in the way and what to do."""

    code = "stack_error"
