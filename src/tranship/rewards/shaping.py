"""Rewards of the length alone: what is taken off long responses."""

from __future__ import annotations

import math
from typing import Any, Literal

from tranship.types import UserError


def overlong_penalty(length: int, max_tokens: int, cache_tokens: int, factor: float) -> float:
    """What is added to the reward of a response of `length` tokens: 0 or less.

    0 up to max_tokens - cache_tokens, then linear down to -factor at max_tokens, and -factor beyond (DAPO,
    arXiv:2503.14476, equation 13). cache_tokens 0: off, always 0. Max 100, cache 20, factor 1: 80 -> 0, 81 -> -0.05,
    90 -> -0.5, 100 and 101 -> -1.
    """
    if cache_tokens == 0:
        return 0.0
    over = length - (max_tokens - cache_tokens)
    return -factor * min(max(over / cache_tokens, 0.0), 1.0) + 0.0


class LengthPenalty:
    """A penalty between 0 and -1 that grows with the number of tokens, whatever the answer.

    start: tokens up to which it is 0. end: from where it is -1 (null: the cap of a response). x = (tokens - start) /
    (end - start), within 0 and 1. linear: -x. cosine: -(1 - cos(pi x)) / 2, flat at both ends. With start 0, end 100:
    25 tokens give -0.25 (linear) or -0.1464 (cosine), 50 give -0.5 in both. Use it as a term, with a weight.
    """

    def __init__(self, shape: Literal["linear", "cosine"] = "linear", start: int = 0, end: int | None = None) -> None:
        if shape not in ("linear", "cosine"):
            raise UserError(f"shape {shape!r} is not known: use linear or cosine")
        if start < 0 or (end is not None and end <= start):
            raise UserError(f"start {start} and end {end}: start must be at least 0, and end above it")
        self._shape = shape
        self._start = start
        self._end = end

    def __call__(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: dict[str, Any] | None = None,
        *,
        num_tokens: int,
        max_response_tokens: int,
    ) -> float:
        """The penalty of a response."""
        end = max_response_tokens if self._end is None else self._end
        if end <= self._start:
            raise ValueError(f"start {self._start} is not below the cap of {end} tokens")
        x = min(max((num_tokens - self._start) / (end - self._start), 0.0), 1.0)
        return 0.0 - (x if self._shape == "linear" else (1 - math.cos(math.pi * x)) / 2)
