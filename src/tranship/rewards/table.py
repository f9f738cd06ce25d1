"""The built-in reward functions by name. Each has verl's signature:

compute_score(data_source, solution_str, ground_truth, extra_info=None, **args) -> float | dict | None
"""

from __future__ import annotations

from collections.abc import Mapping

REWARDS: Mapping[str, str] = {
    "exact_integer": "tranship.rewards.numbers:exact_integer",
    "hash_answer": "tranship.rewards.numbers:hash_answer",
    "boxed": "tranship.rewards.boxed:boxed",
}
