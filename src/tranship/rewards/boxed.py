r"""The reward for answers in \boxed{...}, compared as text after the spellings of LaTeX are made one."""

from __future__ import annotations

import re
from typing import Any

from tranship.rewards.numbers import canonical

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_NUMBER = re.compile(r"[-−]?(?:[0-9]+(?:,[0-9]{3})*|[0-9]*)(?:\.[0-9]+)?")
_DROPPED = re.compile(
    r"\\(?:left|right|displaystyle|!|,|;|:|quad|qquad)(?![A-Za-z])|\\ |[~\s$]|\\\$|\\?%|\^\{?\\circ\}?"
)
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox)\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\frac([0-9])([0-9])")
_SLASH_FRACTION = re.compile(r"([-−]?)([0-9]+)/([0-9]+)")


def boxed(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    r"""Score 1 if the content of the last \boxed{...} (or \fbox{...}) is `ground_truth`, else 0.

    Compared as text: spaces, $, degree and percent signs, \left, \right and \text do not matter, \dfrac is \frac, 1/2
    is \frac{1}{2}, 1,234.50 is 1234.5; no algebra is done. well_formed: 1 if the last box is closed. answer: its
    content in that spelling, or None.
    """
    content = last_boxed(solution_str)
    answer = None if content is None else normalise(content)
    right = answer is not None and answer == normalise(str(ground_truth))
    return {"score": float(right), "well_formed": float(answer is not None), "answer": answer}


def last_boxed(text: str) -> str | None:
    r"""What is inside the last \boxed{...}; None where there is none, or its braces do not close."""
    start = None
    for match in _BOX.finditer(text):
        start = match.end()
    if start is None:
        return None
    depth, position = 1, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start:position]
        position += 1
    return None


def normalise(answer: str) -> str:
    """One spelling of an answer, so that equal strings mean the same to a reader."""
    text = _DROPPED.sub("", _WRAPPED.sub(r"\1", answer)).rstrip(".")
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", text)
    if fraction := _SLASH_FRACTION.fullmatch(text):
        sign = "-" if fraction[1] else ""
        return f"{sign}\\frac{{{fraction[2]}}}{{{fraction[3]}}}"
    if text and _NUMBER.fullmatch(text):
        return canonical(text)
    return text.replace("−", "-")
