"""Examples as token ids with a mask of the tokens to learn.

The tokens are always those of the whole text in one go: what is to learn is found in characters and
carried over to tokens by the tokenizer's offsets, so a mask never changes the tokens. A sequence has one
begin and one end: where a text brings its own, the tokenizer's are not put beside them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from zero_core.data.chat_template import ChatTemplate, Span
from zero_core.data.examples import (
    ChatExample,
    CompletionExample,
    Example,
    Message,
    PreferenceExample,
    TextExample,
)
from zero_core.data.notes import Note
from zero_core.data.template_settings import TemplateSettings

__all__ = [
    "ExampleTokenizer",
    "Note",
    "Piece",
    "Sample",
    "TemplateSettings",
    "Tokenized",
    "TokenizedExample",
]


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
"""One sequence of a supervised example; two of a preference example, the chosen answer's first."""

Piece = tuple[str, bool]
"""A part of a sequence's text, and whether it is learnt."""


@dataclass(frozen=True, eq=False)
class Tokenized:
    sample: Sample
    notes: tuple[Note, ...] = ()
    """In the order of ``Note``, each once."""


class ExampleTokenizer:
    """Tokenizes examples of any format with one fast Hugging Face tokenizer that has an ``eos_token``."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: TemplateSettings | None = None) -> None:
        self._tokenizer = tokenizer
        self._eos, self._bos = str(tokenizer.eos_token), tokenizer.bos_token
        around: list[int] = tokenizer("", add_special_tokens=True)["input_ids"]
        self._adds_bos = tokenizer.bos_token_id is not None and tokenizer.bos_token_id in around[:1]
        self._chat_template = ChatTemplate(tokenizer, settings)

    def __call__(self, example: Example | PreferenceExample) -> Tokenized:
        """Raises TemplateRefusal or AmbiguousTemplate on a conversation that the template can't take."""
        sequences, notes = self._sequences(example)
        return Tokenized(tuple(sequence.tokens for sequence in sequences), notes)

    def annotate(self, example: Example | PreferenceExample) -> tuple[tuple[Piece, ...], ...]:
        """The text of each sequence of the example, in pieces that are learnt and pieces that are not."""
        sequences, _ = self._sequences(example)
        return tuple(tuple(self._pieces(sequence)) for sequence in sequences)

    def _sequences(self, example: Example | PreferenceExample) -> tuple[list["_Sequence"], tuple[Note, ...]]:
        match example:
            case ChatExample():
                return self._chats(example)
            case PreferenceExample():
                return self._chats(_answered(example, example.chosen), _answered(example, example.rejected))
            case CompletionExample(prompt=prompt, completion=completion):
                return [self._plain(prompt + completion, len(prompt))], ()
            case TextExample(text=text):
                return [self._plain(text, 0)], ()

    def _chats(self, *examples: ChatExample) -> tuple[list["_Sequence"], tuple[Note, ...]]:
        rendered = [self._chat_template.render(example) for example in examples]
        found = {note for chat in rendered for note in chat.notes}
        sequences = [self._tokenize(chat.text, chat.targets, bare=True) for chat in rendered]
        return sequences, tuple(note for note in Note if note in found)

    def _plain(self, text: str, learnt_from: int) -> "_Sequence":
        """``text`` between a begin, where the tokenizer writes one, and an end, which is learnt."""
        if self._adds_bos and text.startswith(self._bos):
            text, learnt_from = text[len(self._bos) :], max(0, learnt_from - len(self._bos))
        while text.rstrip().endswith(self._eos):
            text = text.rstrip().removesuffix(self._eos)
        return self._ended(self._tokenize(text, ((learnt_from, len(text)),), bare=False))

    def _tokenize(self, text: str, targets: Sequence[Span], *, bare: bool) -> "_Sequence":
        """``bare``: the text has the special tokens already, as a chat template writes them itself."""
        encoded = self._tokenizer(
            text, add_special_tokens=not bare, return_offsets_mapping=True, truncation=False, verbose=False
        )
        offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        ids = np.asarray(encoded["input_ids"], dtype=np.int32)
        mask = _overlapping(offsets, targets)
        if self._bos is not None and self._bos != self._eos:
            mask &= ids != self._tokenizer.bos_token_id
        return _Sequence(TokenizedExample(ids, mask), text, offsets)

    def _ended(self, sequence: "_Sequence") -> "_Sequence":
        """With the end-of-sequence token, which is learnt, after it."""
        eos = self._tokenizer.eos_token_id
        ids, mask, offsets = sequence.tokens.input_ids, sequence.tokens.target_mask, sequence.offsets
        if len(ids) == 0 or ids[-1] != eos:
            end = len(sequence.text)
            ids, mask = np.append(ids, np.int32(eos)), np.append(mask, False)
            offsets = np.append(offsets, [[end, end]], axis=0)
        mask[-1] = True
        return _Sequence(TokenizedExample(ids, mask), sequence.text, offsets)

    def _pieces(self, sequence: "_Sequence") -> list[Piece]:
        """Tokens that are not in the text, a begin or an end, are shown by their names."""
        pieces: list[tuple[list[str], bool]] = []
        shown = 0
        tokens = sequence.tokens
        for token, learnt, (start, end) in zip(
            tokens.input_ids.tolist(), tokens.target_mask.tolist(), sequence.offsets.tolist(), strict=True
        ):
            if start == end and token in (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id):
                text = str(self._tokenizer.convert_ids_to_tokens(token))
            else:
                text, shown = sequence.text[shown:end], max(shown, end)
            if not pieces or pieces[-1][1] != learnt:
                pieces.append(([], learnt))
            pieces[-1][0].append(text)
        return [("".join(texts), learnt) for texts, learnt in pieces]


@dataclass(frozen=True, eq=False)
class _Sequence:
    tokens: TokenizedExample
    text: str
    offsets: NDArray[np.int64]
    """(length, 2) [start, end) of each token in ``text``."""


def _answered(example: PreferenceExample, answer: tuple[Message, ...]) -> ChatExample:
    """The whole conversation with one of its answers, of which only the answer is learnt."""
    trained = [message["role"] == "assistant" and message.get("weight", 1) == 1 for message in answer]
    return ChatExample(
        example.line,
        (*example.prompt, *answer),
        (*[False] * len(example.prompt), *trained),
        example.tools,
    )


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
    borders = np.asarray(targets, dtype=np.int64).reshape(-1, 2)
    # The first target that ends after a token starts is the only one to ask: they are in order.
    asked = np.searchsorted(borders[:, 1], starts, side="right")
    some = asked < len(borders)
    mask[some] = borders[asked[some], 0] < ends[some]
    return mask
