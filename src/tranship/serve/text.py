"""Text of responses that grow: tokens in, text out, cut before a stop string. Pieces add up to the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

Decode = Callable[[Sequence[int]], str]
_HALF_CHARACTER = "�"


class GrowingText:
    """The text of one response. What `push` gave so far is always a beginning of what `decode` makes of all tokens.

    Characters that may still be half, and text that may become a stop string, are held back until more is known.
    """

    def __init__(self, decode: Decode, stop_strings: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = stop_strings
        self._ids: list[int] = []
        # What lies before `_start` is decoded for good; `_start` to `_read` is decoded again as context.
        self._start = self._read = 0
        self._decoded = ""
        self._given = 0
        self._cut = False

    @property
    def length(self) -> int:
        """Characters decoded so far, held back ones included."""
        return len(self._decoded)

    def push(self, token_ids: Sequence[int], last: bool = False) -> str:
        """What these tokens add to the text. last: nothing comes after them."""
        self._ids += token_ids
        if last:
            self._decode_all()
        else:
            self._decode_more()
        end = self._end(last)
        new, self._given = self._decoded[self._given : end], max(end, self._given)
        return new

    def _decode_more(self) -> None:
        before = self._decode(self._ids[self._start : self._read])
        now = self._decode(self._ids[self._start :])
        if len(now) > len(before) and not now.endswith(_HALF_CHARACTER):
            self._decoded += now[len(before) :]
            self._start, self._read = self._read, len(self._ids)

    def _decode_all(self) -> None:
        whole = self._decode(self._ids)
        # What was given cannot be taken back, should a tokenizer write it otherwise with more context.
        self._decoded += whole[len(self._decoded) :]

    def _end(self, last: bool) -> int:
        """How much of the decoded text may be given."""
        if self._cut:
            return self._given
        margin = max((len(stop) for stop in self._stops), default=1) - 1
        begin = max(0, self._given - margin)
        found = [at for stop in self._stops if (at := self._decoded.find(stop, begin)) >= 0]
        if found:
            self._cut = True
            return max(min(found), self._given)
        if last or not self._stops:
            return len(self._decoded)
        return self._end_of_certain()

    def _end_of_certain(self) -> int:
        longest = max(len(stop) for stop in self._stops) - 1
        for size in range(min(longest, len(self._decoded) - self._given), 0, -1):
            tail = self._decoded[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return len(self._decoded) - size
        return len(self._decoded)


class TokenTexts:
    """The text of single tokens, special ones written out."""

    def __init__(self, decode: Decode) -> None:
        self._decode = lru_cache(maxsize=65536)(lambda token_id: decode([token_id]))

    def text(self, token_id: int) -> str:
        """Its text; a token that is a part of a character has a replacement character."""
        return self._decode(int(token_id))

    def utf8(self, token_id: int) -> list[int] | None:
        """The bytes of its text; None where it is a part of a character."""
        text = self.text(token_id)
        return None if _HALF_CHARACTER in text else list(text.encode())


def decoder(tokenizer: Any, *, skip_special_tokens: bool) -> Decode:
    """Token ids to text, spaces as they were sampled."""

    def decode(token_ids: Sequence[int]) -> str:
        text = tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str), text
        return text

    return decode
