"""Examples as token ids with a mask of the tokens to learn.

The tokens are always those of the whole text in one go: what is to learn is found in characters and
carried over to tokens by the tokenizer's offsets, so a mask never changes the tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from zero_core.data.chat_template import ChatTemplate, Span
from zero_core.data.examples import ChatExample, CompletionExample, Example, TextExample
from zero_core.data.notes import Note
from zero_core.data.template_settings import TemplateSettings


@dataclass(frozen=True, eq=False)
class TokenizedExample:
    input_ids: NDArray[np.int32]
    """(length,)"""

    target_mask: NDArray[np.bool_]
    """(length,) Tokens to learn."""

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def target_tokens(self) -> int:
        """Tokens that are predicted: token t + 1 is predicted at t, so the first never is."""
        return int(np.count_nonzero(self.target_mask[1:]))


Sample = tuple[TokenizedExample, ...]
"""One sequence of a supervised example, two (chosen, rejected) of a preference example."""


@dataclass(frozen=True)
class Tokenized:
    sample: Sample
    notes: tuple[Note, ...] = ()


class ExampleTokenizer:
    """Tokenizes examples of any format with one fast Hugging Face tokenizer that has an ``eos_token``."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: TemplateSettings) -> None:
        self._tokenizer = tokenizer
        self._chat_template = ChatTemplate(tokenizer)

    def __call__(self, example: Example) -> Tokenized:
        """Raises TemplateRefusal or AmbiguousTemplate on a conversation that the template can't take."""
        return Tokenized((self._sequence(example),))

    def _sequence(self, example: Example) -> TokenizedExample:
        match example:
            case ChatExample():
                rendered = self._chat_template.render(example)
                return self._tokenize(rendered.text, rendered.targets, bare=True)
            case CompletionExample(prompt=prompt, completion=completion):
                text = prompt + completion
                return self._ended(self._tokenize(text, ((len(prompt), len(text)),), bare=False))
            case TextExample(text=text):
                return self._ended(self._tokenize(text, ((0, len(text)),), bare=False))

    def _tokenize(self, text: str, targets: Sequence[Span], *, bare: bool) -> TokenizedExample:
        """``bare``: the text has the special tokens already, as a chat template writes them itself."""
        encoded = self._tokenizer(
            text, add_special_tokens=not bare, return_offsets_mapping=True, truncation=False, verbose=False
        )
        offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        return TokenizedExample(
            np.asarray(encoded["input_ids"], dtype=np.int32), _overlapping(offsets, targets)
        )

    def _ended(self, example: TokenizedExample) -> TokenizedExample:
        """With the end-of-sequence token, which is learnt, after it."""
        eos = self._tokenizer.eos_token_id
        ids, mask = example.input_ids, example.target_mask
        if len(ids) == 0 or ids[-1] != eos:
            ids, mask = np.append(ids, np.int32(eos)), np.append(mask, False)
        mask[-1] = True
        return TokenizedExample(ids, mask)


def _overlapping(offsets: NDArray[np.int64], targets: Sequence[Span]) -> NDArray[np.bool_]:
    """Which tokens have a character in a target. One across a border counts: it has words to learn."""
    mask = np.zeros(len(offsets), dtype=np.bool_)
    if len(offsets) == 0:
        return mask
    ends = offsets[:, 1]
    # Some tokenizers leave a token's leading spaces out of its offsets, a token of spaces then has none
    # at all: each token reaches back to where the one before it ended.
    previous_ends = np.concatenate(([0], np.maximum.accumulate(ends)[:-1]))
    starts = np.minimum(offsets[:, 0], previous_ends)
    for start, end in targets:
        mask |= (starts < end) & (ends > start)
    return mask
