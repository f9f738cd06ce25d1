"""A reward that depends on whether an answer is right, and then on its length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tranship.rewards.calls import load
from tranship.rewards.scoring import to_score
from tranship.types import UserError


class CosineLength:
    """The cosine reward of Yeo et al. (arXiv:2502.03373, section 4): right answers should be short, wrong ones long.

    With x = num_tokens / max_response_tokens: end + (start - end) (1 + cos(pi x)) / 2, which goes from `start` (an
    empty response) to `end` (the cap) along half a cosine. right, wrong: (start, end) for each. exceeded: the reward of
    a response that reached the cap (finish_reason length). of, of_args: the function that says whether the answer is
    right (its score is above 0.5); what is no score of it is none here. Defaults, 100 of 200 tokens: right 1.5,
    wrong -5.
    """

    def __init__(
        self,
        of: str = "exact_integer",
        of_args: Mapping[str, Any] | None = None,
        right: tuple[float, float] = (2.0, 1.0),
        wrong: tuple[float, float] = (-10.0, 0.0),
        exceeded: float = -10.0,
    ) -> None:
        for name, ends in (("right", right), ("wrong", wrong)):
            if len(ends) != 2:
                raise UserError(f"{name} {ends!r} is not a pair: give the rewards at length 0 and at the cap")
        self._of = load(of, dict(of_args or {}), "of")
        if self._of.is_async:
            raise UserError(f"of: {of} is asynchronous: use a plain function here")
        self._right = right
        self._wrong = wrong
        self._exceeded = exceeded

    def __call__(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: dict[str, Any] | None = None,
        *,
        row: dict[str, Any],
    ) -> Any:
        """The reward of a response, and under "of" what the inner function gave."""
        inner = to_score(self._of.run(row))
        if inner.status == "masked":
            return {**inner.extra, "masked": True}
        if inner.value is None:
            raise ValueError(f"of: {inner.reason}")
        if row["finish_reason"] == "length":
            score = self._exceeded
        else:
            start, end = self._right if inner.value > 0.5 else self._wrong
            share = min(row["num_tokens"] / row["max_response_tokens"], 1.0)
            score = end + (start - end) * (1 + math.cos(math.pi * share)) / 2
        return {**inner.extra, "score": score, "of": inner.value}
