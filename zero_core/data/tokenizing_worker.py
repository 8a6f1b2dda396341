"""Processes that tokenize for another: ``python -m zero_core.data.tokenizing_worker REQUESTS,ANSWERS ...``.

Each pair of file descriptors gets a process: a line of examples in, an answer out, until the input ends.
They are forked from this one, which has imported and loaded everything and has no threads: that takes
seconds and hundreds of megabytes, once. The recipe comes as JSON on standard input.

All of them end by themselves when the other side is gone: their input ends, or nobody reads their answer.
"""

import json
import os
import sys
import traceback
from pathlib import Path
from typing import IO

from zero_core.data.recipe import ExamplePreparer, Recipe
from zero_core.data.wire import decode_examples, write_answer
from zero_core.models.model_files import InvalidModel


def main() -> None:
    pairs = [tuple(map(int, pair.split(","))) for pair in sys.argv[1:]]
    model_dir, settings = json.load(sys.stdin)
    # What a library prints belongs to the log.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        prepare = Recipe(Path(model_dir), **settings).preparer()
    except InvalidModel as error:
        for _, answers in pairs:
            os.write(answers, json.dumps({"invalid_model": str(error)}).encode() + b"\n")
        return
    for pair in pairs:
        if os.fork() == 0:
            _work(prepare, pair, pairs)
    for descriptor in sum(pairs, ()):
        os.close(descriptor)
    for _ in pairs:
        os.wait()


def serve(requests: IO[bytes], answers: IO[bytes], prepare: ExamplePreparer) -> None:
    for request in requests:
        write_answer(answers, map(prepare, decode_examples(request)))


def _work(prepare: ExamplePreparer, pair: tuple[int, ...], pairs: list[tuple[int, ...]]) -> None:
    """In the new process, which ends here."""
    try:
        # An input ends once nobody can write to it: so no process may keep what is another's.
        for descriptor in set(sum(pairs, ())) - set(pair):
            os.close(descriptor)
        with os.fdopen(pair[0], "rb") as requests, os.fdopen(pair[1], "wb") as answers:
            serve(requests, answers, prepare)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
