"""The tokens of a tokenizer that no ordinary text makes, found in rendered text."""

import re
from collections.abc import Iterable

from transformers import PreTrainedTokenizerBase


class ControlTokens:
    def __init__(self, every: Iterable[str], stops: Iterable[str], bos: str | None) -> None:
        """``stops`` are those at which the model stops; ``bos`` is one that it never writes, unless it is
        one of them as well."""
        self._stops = frozenset(stops)
        self._bos = bos if bos not in self._stops else None
        self._every = _any_of({*every, *self._stops})
        self._stop = _any_of(self._stops)

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, stop_token_ids: Iterable[int]) -> "ControlTokens":
        added = [str(token) for token in tokenizer.added_tokens_encoder if not str(token).isspace()]
        # A generation config may name tokens that the tokenizer lacks.
        stops = filter(None, (tokenizer.convert_ids_to_tokens(token) for token in stop_token_ids))
        return cls(added, {str(tokenizer.eos_token), *map(str, stops)}, tokenizer.bos_token)

    def is_stop(self, token: str) -> bool:
        return token in self._stops

    def is_bos(self, token: str) -> bool:
        return token == self._bos

    def between(self, text: str, start: int, end: int) -> list[re.Match[str]]:
        return list(self._every.finditer(text, start, end))

    def stop_after(self, text: str, start: int) -> int | None:
        """Where a stop token ends that is the next thing at or after ``start`` but for spaces."""
        while start < len(text) and text[start].isspace():
            start += 1
        found = self._stop.match(text, start)
        return found.end() if found else None


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) if longest_first else r"(?!)")
