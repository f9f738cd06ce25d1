"""Rewards for answers that are numbers. Numbers are compared as decimal text, so neither size nor rounding matters."""

from __future__ import annotations

import re
from typing import Any

# A minus sign counts only where it is no subtraction: "12-5" holds 12 and 5, "= -5" holds -5.
_DIGITS = r"(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)"
# Commas that part groups of three are left out; "1,0" stays what it is, and equals no number.
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+")
_NUMBER = rf"(?:(?<![\w.)\]])[-−])?{_DIGITS}"
_ANY_NUMBER = re.compile(_NUMBER)
_AFTER_HASHES = re.compile(rf"####\s*\*{{0,2}}([-−]?)\s*\$?\s*([-−]?)({_DIGITS})")


def exact_integer(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score 1 if the last number of the response is the integer `ground_truth`, else 0.

    well_formed: 1 if the last number is an integer at all. answer: the last number, or None.
    "1,234", "7." and "7.0" are integers; "3.5" is none.
    Examples for 7: "3 + 4 = 7." 1; "It is 7, not 8" 0; "seven" 0 and not well formed.
    """
    wanted = _canonical_truth(ground_truth)
    if "." in wanted:
        raise ValueError(f"ground_truth {ground_truth!r} is not an integer")
    found = _last_number(solution_str)
    well_formed = found is not None and "." not in found
    return {"score": float(found == wanted), "well_formed": float(well_formed), "answer": found}


def hash_answer(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    flexible: bool = False,
) -> dict[str, Any]:
    """Score 1 if the number after the last `####` (GSM8K's form) is `ground_truth`, else 0.

    flexible: where no `####` is followed by a number, the last number of the response counts. well_formed: 1 if a
    `####` is followed by a number. answer: the number that counts, or None. Examples for 42: "#### 42." 1;
    "#### 41 #### 42" 1; "I think 42" 0, flexible 1.
    """
    wanted = _canonical_truth(ground_truth)
    marked = [canonical(match[1] + match[2] + match[3]) for match in _AFTER_HASHES.finditer(solution_str)]
    found = marked[-1] if marked else (_last_number(solution_str) if flexible else None)
    return {"score": float(found == wanted), "well_formed": float(bool(marked)), "answer": found}


def canonical(number: str) -> str:
    """The one spelling of a decimal number: "-1,230.50" -> "-1230.5", "007" -> "7", "-0" -> "0", ".5" -> "0.5"."""
    text = number.replace("−", "-")
    sign, digits = ("-", text[1:]) if text.startswith("-") else ("", text)
    whole, _, fraction = digits.partition(".")
    whole = whole.rstrip(",")
    if _GROUPED.fullmatch(whole):
        whole = whole.replace(",", "")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return value if value == "0" else sign + value


def _last_number(text: str) -> str | None:
    found = _ANY_NUMBER.findall(text)
    return canonical(found[-1]) if found else None


def _canonical_truth(ground_truth: Any) -> str:
    text = str(ground_truth).strip().removeprefix("$")
    if isinstance(ground_truth, bool) or not re.fullmatch(r"[-−+]?(?:[0-9][0-9,]*(?:\.[0-9]*)?|\.[0-9]+)", text):
        raise ValueError(f"ground_truth {ground_truth!r} is not a number")
    return canonical(text.removeprefix("+"))
