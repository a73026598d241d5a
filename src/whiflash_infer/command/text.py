"""Answers as text: whole, and piece by piece while they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\ufffd"  # what a tokenizer makes of half a character


def decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    """Text without special tokens, as it was written."""
    return tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def before_stop(text: str, stop_strings: Sequence[str]) -> str:
    """The text up to the first stop string in it."""
    found = [text.find(stop) for stop in stop_strings if stop in text]
    return text[: min(found)] if found else text


class TextStream:
    """Turns pieces of an answer into text that never has to be taken back.

    Held back are characters whose last byte has not come yet, and what may turn out to be the
    beginning of a stop string.
    """

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop_strings = tuple(stop_strings)
        self._ids: list[int] = []
        self._context = 0  # the tokens from here on tell how the next ones are written
        self._done = 0  # tokens before this one are in the text
        self._held = ""

    def push(self, ids: Sequence[int]) -> str:
        """The text that is certain now."""
        self._ids += ids
        text = self._behind()
        if text and not text.endswith(_INCOMPLETE):
            self._take(text)
        kept = max((_overlap(self._held, stop) for stop in self._stop_strings), default=0)
        return self._emit(len(self._held) - kept)

    def finish(self, ids: Sequence[int], *, stopped: bool) -> str:
        """The rest. stopped: a stop string ended the answer, and it is not part of the text."""
        self._ids += ids
        self._take(self._behind())
        if stopped:
            self._held = before_stop(self._held, self._stop_strings)
        return self._emit(len(self._held))

    def _behind(self) -> str:
        """What the tokens that are not in the text add to it; some are written differently at the
        start of a text, so others come before them."""
        known = decoded(self._tokenizer, self._ids[self._context : self._done])
        return decoded(self._tokenizer, self._ids[self._context :])[len(known) :]

    def _take(self, text: str) -> None:
        self._held += text
        self._context, self._done = self._done, len(self._ids)

    def _emit(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text with which the stop string may begin."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
