"""The built-in reward functions by name. Each has verl's signature, or is a class whose objects have it (constructed
once in each process, with the arguments of the recipe):

compute_score(data_source, solution_str, ground_truth, extra_info=None, **args) -> float | dict | None
"""

from __future__ import annotations

from collections.abc import Mapping

REWARDS: Mapping[str, str] = {
    "exact_integer": "tranship.rewards.numbers:exact_integer",
    "hash_answer": "tranship.rewards.numbers:hash_answer",
    "boxed": "tranship.rewards.boxed:boxed",
    "math_verify": "tranship.rewards.math_verify:MathVerify",
    "format_tags": "tranship.rewards.format:FormatTags",
    "length_penalty": "tranship.rewards.shaping:LengthPenalty",
    "cosine_length": "tranship.rewards.cosine:CosineLength",
    "run_code": "tranship.rewards.run_code:RunCode",
    "reasoning_gym": "tranship.rewards.gym:ReasoningGym",
}
