"""Rewards that a random model has some signal on."""

from __future__ import annotations

import hashlib
import time
from typing import Any


def token_sum(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return hashlib.blake2b(solution_str.encode(), digest_size=1).digest()[0] / 256


def slow(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """As token_sum, but it takes its time."""
    time.sleep(0.2)
    return token_sum(data_source, solution_str, ground_truth)


def broken(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Never returns."""
    raise LookupError("no answer key")


def always_one(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Nothing that could tell samples apart."""
    return 1.0


def now_and_then(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """As token_sum for half of the prompts; nothing that tells samples apart for the others."""
    return token_sum(data_source, solution_str, ground_truth) if int(ground_truth) % 2 else 1.0


def quotes_the_text(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
    """Raises on some texts, and says which."""
    value = token_sum(data_source, solution_str, ground_truth)
    if value < 0.5:
        raise ValueError(f"cannot parse {solution_str!r}: {value}")
    return value
