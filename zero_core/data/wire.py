"""Examples and what they became, between a process and those that tokenize for it: JSON and raw arrays.

An answer is a line of JSON, then the token ids (int32) and the masks (a byte a token) of all its sequences.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import pairwise
from typing import IO, Any

import numpy as np

from zero_core.data import examples
from zero_core.data.examples import Example
from zero_core.data.fitting import Fate
from zero_core.data.notes import Note
from zero_core.data.recipe import Fault, Prepared
from zero_core.data.tokenize import TokenizedExample


def encode_example(example: Example) -> bytes:
    return json.dumps([type(example).__name__, asdict(example)]).encode()


def decode_examples(request: bytes) -> Iterator[Example]:
    """From a JSON list of encoded examples. What is a list at an example's top is a tuple of its class."""
    for name, fields in json.loads(request):
        kind = getattr(examples, name)
        yield kind(**{key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()})


def write_answer(file: IO[bytes], answer: Iterable[Prepared]) -> None:
    answer = list(answer)
    sequences = [sequence for item in answer for sample in item.samples for sequence in sample]
    head = {
        "prepared": [_head(item) for item in answer],
        "lengths": [len(sequence) for sequence in sequences],
    }
    file.write(json.dumps(head).encode() + b"\n")
    for sequence in sequences:
        file.write(sequence.input_ids.astype(np.int32).tobytes())
    for sequence in sequences:
        file.write(sequence.target_mask.astype(np.bool_).tobytes())
    file.flush()


def read_answer(head: dict[str, Any], file: IO[bytes]) -> list[Prepared]:
    """``head`` is the answer's line of JSON, read already. Raises ValueError on one that breaks off."""
    edges = np.concatenate(([0], np.cumsum(head["lengths"], dtype=np.int64)))
    tokens = int(edges[-1])
    content = file.read(5 * tokens)
    if len(content) != 5 * tokens:
        raise ValueError("the answer breaks off")
    ids = np.frombuffer(content, dtype=np.int32, count=tokens)
    mask = np.frombuffer(content, dtype=np.bool_, offset=4 * tokens)
    sequences = (TokenizedExample(ids[start:end], mask[start:end]) for start, end in pairwise(edges))
    return [_prepared(item, sequences) for item in head["prepared"]]


def _head(item: Prepared) -> dict[str, Any]:
    return {
        "line": item.line,
        "fate": item.fate,
        "sequences": [len(sample) for sample in item.samples],
        "notes": item.notes,
        "fault": item.fault,
        "message": item.message,
    }


def _prepared(head: dict[str, Any], sequences: Iterator[TokenizedExample]) -> Prepared:
    return Prepared(
        line=head["line"],
        fate=Fate(head["fate"]),
        samples=tuple(tuple(next(sequences) for _ in range(count)) for count in head["sequences"]),
        notes=tuple(map(Note, head["notes"])),
        fault=head["fault"] and Fault(head["fault"]),
        message=head["message"],
    )
