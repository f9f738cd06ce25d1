"""The reward for the form of a response, whatever it says."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tranship.types import UserError


class FormatTags:
    """Score 1 if the response is exactly its tags in order, <think>...</think><answer>...</answer>, else 0.

    tags: their names. Each opens and closes once; only white space stands between and around them. prefilled: the
    prompt's template has already opened the first one, so the response begins inside it. partial: a response that is
    not exact gets half of the share of the marks (<think>, </think>, ...) that it has once: "<think>a</think> 7" 0.25.
    pattern: a regular expression that the whole response has to match (with . for any character), in place of tags;
    one that backtracks without end is stopped by reward.timeout_s, and the sample is invalid. Examples:
    "<think>a</think> <answer>7</answer>" 1; "<answer>7</answer>" 0; "<think>a</think><answer>7</answer> and more" 0.
    """

    def __init__(
        self,
        tags: Sequence[str] = ("think", "answer"),
        prefilled: bool = False,
        partial: bool = False,
        pattern: str | None = None,
    ) -> None:
        if pattern is None and (not tags or len(set(tags)) < len(tags)):
            raise UserError(f"tags {list(tags)} must be at least one name, each once")
        try:
            self._pattern = None if pattern is None else re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise UserError(f"pattern {pattern!r} is no regular expression: {error}") from error
        marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
        self._prefilled = prefilled
        self._first = marks[0]
        self._marks = marks
        self._partial = partial

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> dict[str, float]:
        """The score of a response."""
        if self._pattern is not None:
            exact = self._pattern.fullmatch(solution_str) is not None
            return {"score": float(exact), "well_formed": float(exact)}
        text = (self._first + solution_str if self._prefilled else solution_str).strip()
        exact = self._is_exact(text)
        score = float(exact)
        if self._partial and not exact:
            score = 0.5 * sum(text.count(mark) == 1 for mark in self._marks) / len(self._marks)
        return {"score": score, "well_formed": float(exact)}

    def _is_exact(self, text: str) -> bool:
        if any(text.count(mark) != 1 for mark in self._marks):
            return False
        places = [text.index(mark) for mark in self._marks]
        if places != sorted(places) or places[0] != 0 or not text.endswith(self._marks[-1]):
            return False
        closing = zip(self._marks[1:-1:2], places[1:-1:2], places[2::2], strict=True)
        return all(not text[place + len(mark) : following].strip() for mark, place, following in closing)
