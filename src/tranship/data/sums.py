"""The built-in source of prompts: sums of two whole numbers, with held-out pairs for validation."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from tranship.types import UserError

_HELD_OUT_SEED = 20250717
_MAX_PAIRS = 1_000_000
# How far off a rejected answer is: a slip of the units or of the tens.
_MISTAKES = (1, -1, 2, -2, 10, -10)


def sums(
    low: int = 1,
    high: int = 20,
    split: Literal["train", "val"] = "train",
    num_val: int = 64,
    suffix: str = "",
    recorded: Literal["demonstration", "preference"] | None = None,
) -> list[dict[str, Any]]:
    """Rows "What is A + B?" for low <= A, B <= high, in verl's schema; the ground truth is the sum, as a string.

    num_val unordered pairs are held out, always the same ones for the same low, high and num_val. "val" gives each of
    them once, in a fixed order of its two numbers; "train" gives all ordered pairs whose unordered pair is not held
    out, so that 3 + 5 never teaches a held-out 5 + 3. suffix: further text of the question, after a space.

    recorded: responses that the rows bring, the same ones each time: "demonstration", the sum (column completion);
    "preference", the sum and a wrong number near it (columns chosen and rejected).
    """
    for name, value in (("low", low), ("high", high), ("num_val", num_val)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise UserError(f"sums: {name} is {value!r}: give a whole number")
    if split not in ("train", "val"):
        raise UserError(f"sums: split is {split!r}: use train or val")
    if recorded not in (None, "demonstration", "preference"):
        raise UserError(f"sums: recorded is {recorded!r}: use demonstration or preference, or leave it out")
    extent = high - low + 1
    if extent < 1 or extent**2 > _MAX_PAIRS:
        raise UserError(f"sums: {low}..{high} gives {max(extent, 0) ** 2} pairs: use 1 to {_MAX_PAIRS}")
    pairs = [(a, b) for a in range(low, high + 1) for b in range(a, high + 1)]
    if not 0 <= num_val < len(pairs):
        raise UserError(f"sums: num_val is {num_val}, but there are {len(pairs)} unordered pairs: use fewer")
    held_out = _held_out(pairs, num_val)
    if split == "val":
        return [_row(a, b, split, suffix, recorded) for a, b in held_out]
    left_out = {pair for a, b in held_out for pair in ((a, b), (b, a))}
    numbers = range(low, high + 1)
    return [_row(a, b, split, suffix, recorded) for a in numbers for b in numbers if (a, b) not in left_out]


def _held_out(pairs: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    bits = np.random.Philox(key=_HELD_OUT_SEED)
    order = np.argsort(bits.random_raw(len(pairs)), kind="stable")[:count]
    swap = bits.random_raw(len(order)) >> np.uint64(63)
    chosen = [pairs[int(index)] for index in order]
    return [(b, a) if flip else (a, b) for (a, b), flip in zip(chosen, swap, strict=True)]


def _row(a: int, b: int, split: str, suffix: str, recorded: str | None) -> dict[str, Any]:
    question = f"What is {a} + {b}?" + (f" {suffix.strip()}" if suffix.strip() else "")
    row: dict[str, Any] = {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"split": split, "a": a, "b": b},
    }
    if recorded == "demonstration":
        row["completion"] = _answer(a + b)
    elif recorded == "preference":
        row["chosen"] = _answer(a + b)
        row["rejected"] = _answer(a + b + _MISTAKES[(a * 31 + b * 17) % len(_MISTAKES)])
    return row


def _answer(number: int) -> list[dict[str, Any]]:
    return [{"role": "assistant", "content": str(number)}]
