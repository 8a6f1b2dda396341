"""A training file, tokenized, in memory: a few flat arrays whatever the number of examples."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from zero_core.data.chat_template import AmbiguousTemplate, TemplateRefusal
from zero_core.data.formats import FileReport, InvalidFile, LineError, Param, read_examples
from zero_core.data.tokenize import ExampleTokenizer, Sample, TokenizedExample
from zero_core.models.model_files import InvalidModel

_KEPT = 20


@dataclass(frozen=True, eq=False)
class Dataset:
    """The usable examples, in the file's order."""

    input_ids: NDArray[np.int32]
    """(tokens,) All examples after one another."""

    target_mask: NDArray[np.bool_]
    """(tokens,)"""

    offsets: NDArray[np.int64]
    """(examples + 1,) Example i is tokens [offsets[i], offsets[i + 1])."""

    sequences: int = 1
    """Of a sample: two of a preference."""

    truncated: int = 0
    """Usable examples that were cut at ``max_length``."""

    dropped: int = 0
    """Examples left out: no token to learn within ``max_length``."""

    @classmethod
    def from_file(
        cls,
        path: Path,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        min_examples: int = 1,
        param: Param = "training_file",
    ) -> "Dataset":
        """Raises InvalidFile (``param`` is blamed) or InvalidModel (its chat template can't be used)."""
        builder = _Builder(ExampleTokenizer(tokenizer), max_length)
        for example in read_examples(path, param):
            try:
                builder.add(builder.tokenize(example).sample[0])
            except TemplateRefusal as refusal:
                builder.refuse(LineError(example.line, "template_refused", str(refusal)))
            except AmbiguousTemplate as error:
                raise InvalidModel(
                    f"its chat template does not show where the assistant's words are (line {example.line} "
                    f"of the {param}: {error}); mark them in the template with {{% generation %}}"
                ) from error
        if builder.examples < min_examples and not builder.errors:
            builder.refuse(
                LineError(
                    None,
                    "too_few_examples",
                    f"the file has {builder.examples} usable examples; at least {min_examples} are needed"
                    f" ({builder.dropped} have no token to learn within max_length {max_length})",
                )
            )
        if builder.errors:
            raise InvalidFile(builder.report(), param)
        return builder.finish()

    def __len__(self) -> int:
        return (len(self.offsets) - 1) // self.sequences

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        first = index * self.sequences
        return tuple(self._sequence(number) for number in range(first, first + self.sequences))

    def _sequence(self, number: int) -> TokenizedExample:
        part = slice(self.offsets[number], self.offsets[number + 1])
        return TokenizedExample(self.input_ids[part], self.target_mask[part])

    def __iter__(self) -> Iterator[Sample]:
        return (self[index] for index in range(len(self)))


class _Builder:
    def __init__(self, tokenize: ExampleTokenizer, max_length: int) -> None:
        self.tokenize = tokenize
        self.examples = self.dropped = self.errors = 0
        self._max_length = max_length
        self._truncated = 0
        self._first_errors: list[LineError] = []
        self._ids, self._mask, self._offsets = array("i"), bytearray(), array("q", [0])

    def add(self, whole: TokenizedExample) -> None:
        kept = slice(self._max_length)
        example = TokenizedExample(whole.input_ids[kept], whole.target_mask[kept])
        if example.target_tokens == 0:
            self.dropped += 1
            return
        self.examples += 1
        self._truncated += len(example) < len(whole)
        self._ids.frombytes(example.input_ids.tobytes())
        self._mask += example.target_mask.tobytes()
        self._offsets.append(len(self._ids))

    def refuse(self, error: LineError) -> None:
        self.errors += 1
        if len(self._first_errors) < _KEPT:
            self._first_errors.append(error)

    def report(self) -> FileReport:
        return FileReport(None, self.examples, tuple(self._first_errors), self.errors)

    def finish(self) -> Dataset:
        return Dataset(
            input_ids=np.frombuffer(self._ids, dtype=np.int32),
            target_mask=np.frombuffer(self._mask, dtype=np.bool_),
            offsets=np.frombuffer(self._offsets, dtype=np.int64),
            truncated=self._truncated,
            dropped=self.dropped,
        )
