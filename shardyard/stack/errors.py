"""What keeps the embedded stack from running."""


class StackError(Exception):
    """The message says what is in the way and what to do."""

    code = "stack_error"
