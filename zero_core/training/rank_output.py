"""What a rank prints names the rank, where several print into one log."""

import atexit
import os
import sys
from typing import TextIO


class _Marked:
    """A text stream that writes whole lines, each behind a mark, so that lines of ranks never mix."""

    def __init__(self, stream: TextIO, mark: str) -> None:
        self._stream = stream
        self._mark = mark
        self._begun = ""

    def write(self, text: str) -> int:
        *whole, self._begun = (self._begun + text).split("\n")
        if whole:
            self._stream.write("".join(f"{self._mark}{line}\n" for line in whole))
            self._stream.flush()
        return len(text)

    def flush(self) -> None:
        """A line that has only begun waits for its end."""

    def finish(self) -> None:
        if self._begun:
            self.write("\n")

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def mark_output() -> None:
    """Call it before libraries that log are imported: they keep the stream that they find."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    mark = f"[rank {os.environ['RANK']}] "
    out, err = _Marked(sys.stdout, mark), _Marked(sys.stderr, mark)
    sys.stdout, sys.stderr = out, err
    atexit.register(out.finish)
    atexit.register(err.finish)
