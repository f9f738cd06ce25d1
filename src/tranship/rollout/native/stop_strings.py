"""Finding a stop string in a response that grows token by token, by decoding its end alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, special tokens written out."""

MARGIN_TOKENS = 8
"""Decoded beside the string's own: the first ones may be half a character, or lose a leading space."""


def text_ended(token_ids: np.ndarray, strings: Sequence[str], decode: Decode) -> bool:
    """Whether one of `strings` stands in the text of the last tokens (int32 [T]).

    A token has at least one byte of text, so as many tokens as the longest string has bytes hold it, together with the
    last token. It is asked after every token: a string that was complete earlier has ended the response earlier.
    """
    window = max(len(string.encode()) for string in strings) + MARGIN_TOKENS
    text = decode(token_ids[-window:].tolist())
    return any(string in text for string in strings)
