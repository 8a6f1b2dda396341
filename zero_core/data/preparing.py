"""From a training file to a dataset: once, on all cores that are idle, for every rank and later run.

The key of what is kept has everything that decides the tokens: the file's content, the tokenizer and its
template, the settings, and the code that reads them.
"""

import hashlib
import json
from array import array
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import zero_core.data
import zero_core.models
from zero_core.checkpoints import durable
from zero_core.data.cache import Cache
from zero_core.data.dataset import Dataset
from zero_core.data.findings import Findings
from zero_core.data.fitting import Fate
from zero_core.data.formats import Example, FileReport, InvalidFile, LineError, Param, read_examples
from zero_core.data.recipe import Fault, Prepared, Recipe
from zero_core.data.tokenizing_pool import TokenizingPool, processes_for
from zero_core.models.model_files import InvalidModel

OnProgress = Callable[[int, int | None], None]
"""Called with the lines that are done, and all of them once they are counted, after each piece of the work;
often, so it must be fast. What it raises ends the work."""

_BLOCK = 16 * 2**20
_KEPT = 20
_TOKENIZER_SUFFIXES = (".json", ".jinja", ".model", ".txt")


def prepare(
    path: Path,
    param: Param,
    recipe: Recipe,
    cache: Cache,
    min_examples: int = 1,
    on_progress: OnProgress = lambda done, total: None,
    processes: int | None = None,
) -> str:
    """Have the file in the cache; its key. ``processes``: None takes as many as pay.

    Raises InvalidFile (``param`` is blamed), InvalidModel (its chat template can't be used), or OSError.
    """
    sha256, lines = _read_through(path, on_progress)
    key = _key(sha256, recipe)
    meta = cache.meta(key)
    if meta is None:
        builder = _Builder(param)
        workers = processes_for(path.stat().st_size) if processes is None else processes
        with closing(_prepared(read_examples(path, param), recipe, workers)) as prepared:
            for item in prepared:
                builder.add(item)
                on_progress(item.line, lines)
        builder.raise_errors()
        meta = builder.meta()
        # Before it is kept: a file without any usable example has no arrays to map.
        _require(meta, min_examples, param, recipe.max_length)
        cache.store(key, builder.arrays(), meta)
    else:
        _require(meta, min_examples, param, recipe.max_length)
    on_progress(lines, lines)
    return key


def open_dataset(cache: Cache, key: str, param: Param, max_length: int) -> Dataset:
    """What ``prepare`` made, on any rank of its host."""
    arrays, meta = cache.read(key)
    findings = Findings.from_json(meta["findings"])
    return Dataset(
        **arrays,
        sequences=meta["sequences"],
        warnings=findings.warnings(param, max_length),
        truncated=findings.count(Fate.CUT),
        dropped=findings.count(Fate.TOO_LONG) + findings.count(Fate.NO_TARGET),
    )


def _read_through(path: Path, on_progress: OnProgress) -> tuple[str, int]:
    """The file's sha256 and how many lines it has."""
    digest, lines, last = hashlib.sha256(), 0, b"\n"
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            lines += block.count(b"\n")
            last = block[-1:]
            on_progress(0, None)
    return digest.hexdigest(), lines + (last != b"\n")


def _key(sha256: str, recipe: Recipe) -> str:
    tokenizer = [
        path
        for pattern in ("*", "additional_chat_templates/*")
        for path in recipe.model_dir.glob(pattern)
        if path.suffix in _TOKENIZER_SUFFIXES
    ]
    rooms = (Path(str(room.__file__)).parent for room in (zero_core.data, zero_core.models))
    code = [path for room in rooms for path in room.glob("*.py")]
    parts = {
        "file": sha256,
        "tokenizer": {str(p.relative_to(recipe.model_dir)): durable.sha256_of(p) for p in tokenizer},
        "code": sorted(durable.sha256_of(path) for path in code),
        "versions": {name: version(name) for name in ("jinja2", "numpy", "tokenizers", "transformers")},
        "settings": recipe.settings(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _prepared(examples: Iterator[Example], recipe: Recipe, processes: int) -> Generator[Prepared, None, None]:
    if processes == 1:
        yield from map(recipe.preparer(), examples)
        return
    with TokenizingPool(recipe, processes) as pool:
        yield from pool.prepare(examples)


def _require(meta: dict[str, Any], min_examples: int, param: Param, max_length: int) -> None:
    if meta["samples"] >= min_examples:
        return
    findings = Findings.from_json(meta["findings"])
    because = [f"{findings.count(Fate.NO_TARGET)} have no token to learn within max_length {max_length}"]
    if too_long := findings.count(Fate.TOO_LONG):
        because.append(f"{too_long} are longer and are left out")
    message = (
        f"the file has {meta['samples']} usable examples; at least {min_examples} are needed"
        f" ({', '.join(because)})"
    )
    report = FileReport(None, meta["samples"], (LineError(None, "too_few_examples", message),), 1)
    raise InvalidFile(report, param)


class _Builder:
    def __init__(self, param: Param) -> None:
        self._param = param
        self._findings = Findings()
        self._samples = self._error_count = 0
        self._sequences = 1
        self._errors: list[LineError] = []
        self._ids, self._mask = array("i"), bytearray()
        self._offsets, self._lines = array("q", [0]), array("q")

    def add(self, item: Prepared) -> None:
        """Raises InvalidModel."""
        if item.fault is not None:
            self._refuse(item)
            return
        self._findings.examples += 1
        if item.fate != Fate.WHOLE:
            self._findings.add(item.fate, item.line)
        for note in item.notes if item.samples else ():
            self._findings.add(note, item.line)
        for sample in item.samples:
            self._samples += 1
            self._sequences = len(sample)
            self._lines.append(item.line)
            for sequence in sample:
                self._ids.frombytes(sequence.input_ids.tobytes())
                self._mask += sequence.target_mask.tobytes()
                self._offsets.append(len(self._ids))

    def _refuse(self, item: Prepared) -> None:
        if item.fault == Fault.AMBIGUOUS_TEMPLATE:
            raise InvalidModel(
                f"its chat template does not show where the assistant's words are (line {item.line} of the "
                f"{self._param}: {item.message}); mark them in the template with {{% generation %}}"
            )
        assert item.fault is not None
        self._error_count += 1
        if len(self._errors) < _KEPT:
            self._errors.append(LineError(item.line, item.fault, item.message))

    def raise_errors(self) -> None:
        if self._errors:
            report = FileReport(None, self._samples, tuple(self._errors), self._error_count)
            raise InvalidFile(report, self._param)

    def meta(self) -> dict[str, Any]:
        return {
            "samples": self._samples,
            "sequences": self._sequences,
            "findings": self._findings.as_json(),
        }

    def arrays(self) -> dict[str, NDArray[Any]]:
        return {
            "input_ids": np.frombuffer(self._ids, dtype=np.int32),
            "target_mask": np.frombuffer(self._mask, dtype=np.bool_),
            "offsets": np.frombuffer(self._offsets, dtype=np.int64),
            "lines": np.frombuffer(self._lines, dtype=np.int64),
        }
