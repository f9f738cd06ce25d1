"""Worlds in which a random model makes calls: they are made for it."""

from __future__ import annotations

import hashlib
from typing import Any

from tranship.envs import Step
from tranship.envs.calculator import Calculator


class Drill(Calculator):
    """Calculates the row's expression after each of the first `calls` turns; the next is scored by its text alone.

    fail_index, fail_at: the row and the turn (0: the reset) at which it raises.
    """

    def __init__(self, calls: int = 2, fail_index: int | None = None, fail_at: int = 1) -> None:
        super().__init__()
        self._calls = calls
        self._fail_index = fail_index
        self._fail_at = fail_at

    def begin(self, prompt_info: dict[str, Any], seed: int) -> None:
        super().begin(prompt_info, seed)
        self._fails = prompt_info["extra_info"]["index"] == self._fail_index
        self._expression = prompt_info["extra_info"]["expression"]
        self._turn = 0
        self._maybe_fail()

    def step(self, message: dict[str, Any]) -> Step:
        self._turn += 1
        self._maybe_fail()
        calls = [{"name": "calculate", "arguments": {"expression": self._expression}}]
        return super().step({**message, "tool_calls": calls if self._turn <= self._calls else []})

    def finish(self, answer: str) -> float:
        return hashlib.blake2b(answer.encode(), digest_size=1).digest()[0] / 256

    def _maybe_fail(self) -> None:
        if self._fails and self._turn == self._fail_at:
            raise RuntimeError("no such task")
