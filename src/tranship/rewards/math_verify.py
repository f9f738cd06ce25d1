r"""The reward for answers that are expressions, compared by algebra (the library math-verify)."""

from __future__ import annotations

import importlib
from typing import Any

from tranship.rewards.boxed import last_boxed
from tranship.types import UserError


class MathVerify:
    r"""Score 1 if the answer of the response equals `ground_truth` as an expression, else 0.

    The answer is the last \boxed{...}; without one what math-verify extracts: $...$ or \(...\), else the last number or
    expression of the text. ground_truth: LaTeX, with or without \boxed or $, or a number. well_formed: 1 if anything
    was extracted. answer: what was, as text, or None. Examples for \frac{1}{2}: "\boxed{0.5}" 1; "It is $\frac{2}{4}$."
    1; "\boxed{x}" 0; "none" 0 and not well formed. The library's own limits of time, which would make a slow comparison
    count as wrong, are off: reward.timeout_s stops it, and the sample is invalid. precision: decimals that two numbers
    have to share.
    """

    def __init__(self, precision: int = 6) -> None:
        try:
            self._library = importlib.import_module("math_verify")
        except ImportError as error:
            raise UserError("math-verify is not installed: pip install 'tranship[rewards]'") from error
        self._precision = precision

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The score of a response. Raises ValueError where ground_truth is no expression."""
        text = str(ground_truth)
        marked = text if "$" in text or "\\boxed" in text else f"\\boxed{{{text}}}"
        wanted = self._library.parse(marked, parsing_timeout=None)
        if not wanted:
            raise ValueError(f"ground_truth {ground_truth!r:.80} is no expression that math-verify can read")
        box = last_boxed(solution_str)
        answer = solution_str if box is None else f"\\boxed{{{box}}}"
        found = self._library.parse(answer, parsing_timeout=None)
        right = bool(found) and self._library.verify(
            wanted, found, float_rounding=self._precision, timeout_seconds=None
        )
        answer = str(found[0]) if found else None
        return {"score": float(right), "well_formed": float(bool(found)), "answer": answer}
