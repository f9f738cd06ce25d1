"""What a reward function returned becomes a Score: scored, masked, or invalid with a reason. Never a made-up zero."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tranship.types import Score

MAX_REASON = 500
MAX_SCORE = 1e100
# What an adapter returns where its function says that it has nothing to say about a sample.
NOT_APPLICABLE = object()
_INT64 = 2**63


def to_score(result: Any) -> Score:
    """The Score of a function's result: a finite number, or a dict with "score" (further entries are kept as extra).

    A dict with "masked": True is masked: the sample is left out on purpose. Everything else (None, NaN, infinity,
    text, lists, a dict without a score) is invalid.
    """
    if isinstance(result, Mapping):
        extra = {str(key): _plain(value) for key, value in result.items() if key not in ("score", "masked")}
        if result.get("masked") is True:
            return Score("masked", extra=extra)
        if "score" not in result:
            return invalid(f"returned a dict without 'score' (keys: {', '.join(map(str, result)) or 'none'})", extra)
        return _number(result["score"], extra)
    return _number(result, {})


def sum_score(values: Sequence[float], extra: dict[str, Any], raw: float | None = None) -> Score:
    """A scored sample whose value is the sum of `values`; invalid where that is not finite."""
    total = float(sum(values))
    if not math.isfinite(total):
        return invalid(f"the sum of its rewards is not finite: {list(values)}", extra)
    return Score("scored", total, extra=extra, raw=raw)


def invalid(reason: str, extra: dict[str, Any] | None = None) -> Score:
    """An invalid Score; the reason is one line of at most 500 characters."""
    return Score("invalid", reason=" ".join(reason.split())[:MAX_REASON] or "no reason given", extra=extra or {})


def from_message(message: Mapping[str, Any]) -> Score:
    """A Score as `to_message` wrote it."""
    return Score(message["status"], message["value"], message["reason"], message["extra"], message["raw"])


def to_message(score: Score) -> dict[str, Any]:
    """A Score in JSON values: status, value, raw, reason, extra."""
    return {
        "status": score.status,
        "value": score.value,
        "raw": score.raw,
        "reason": score.reason,
        "extra": score.extra,
    }


def _number(result: Any, extra: dict[str, Any]) -> Score:
    if result is None:
        return invalid("returned None", extra)
    value = _plain(result)
    if not isinstance(value, int | float):
        return invalid(f"returned {type(result).__name__} {result!r:.80}, not a number", extra)
    number = float(value)
    if not math.isfinite(number):
        return invalid(f"returned {number}", extra)
    if abs(number) > MAX_SCORE:
        return invalid(f"returned {number:g}, beyond {MAX_SCORE:g}: its square overflows in statistics", extra)
    return Score("scored", number, extra=extra)


def _plain(value: Any) -> Any:
    """`value` in JSON types. Scalars of numpy and torch become Python's; what has no such form becomes its repr."""
    if value is None or isinstance(value, str | bool | float):
        return value
    if isinstance(value, int):
        return _plain_int(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return _plain(value.item())
    return f"{value!r:.200}"


def _plain_int(value: int) -> int | float:
    """An integer that 64 bits hold, else the nearest float (infinity where there is none)."""
    if -_INT64 <= value < _INT64:
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
