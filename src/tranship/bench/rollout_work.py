"""What every side of `bench rollout` does. Imports nothing of tranship: a peer's own environment reads it too."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

GROUP = 8
NEW_TOKENS = 64
CHECK_TOKENS = 24
LONGEST = 256
_PROMPT_TOKENS = (66, 75)
_FIRST_PLAIN_ID = 64


@dataclass(frozen=True)
class Case:
    """One model in one dtype. model: a name of the catalog, or the family of a tiny random model."""

    model: str
    dtype: str
    batches: tuple[int, ...]

    def describe(self) -> str:
        """The case in one line."""
        batches = ", ".join(map(str, self.batches))
        return f"{self.model}, {self.dtype}: batches of {batches}, groups of {GROUP}, {NEW_TOKENS} new tokens"


def prompts(count: int, vocab: int, seed: int) -> list[list[int]]:
    """Token ids of `count` prompts of 66 to 74 tokens, drawn from `seed`."""
    random = np.random.default_rng(seed)
    lengths = random.integers(*_PROMPT_TOKENS, count)
    return [random.integers(min(_FIRST_PLAIN_ID, vocab // 2), vocab, length).tolist() for length in lengths]


def check_made(ids: list[list[int]], logprobs: list[list[float]], batch: int, tokens: int) -> None:
    """Raise AssertionError unless `batch` responses of `tokens` tokens are there, with log-probs, of one group no two
    the same."""
    assert len(ids) == len(logprobs) == batch, f"{len(ids)} responses, {len(logprobs)} log-probs, not {batch}"
    assert all(len(row) == tokens for row in (*ids, *logprobs)), f"a response has not {tokens} tokens"
    assert np.isfinite(np.array(logprobs)).all(), "a log-prob is not finite"
    assert (np.array(logprobs) <= 0).all(), "a log-prob is positive"
    assert len({tuple(row) for row in ids}) == batch, "two responses are the same"


def answer(handlers: Mapping[str, Callable[..., dict[str, Any]]]) -> None:
    """Answer each line {"do": NAME, ...} of standard input, with "now", the time when the answer was ready.

    What libraries print goes to standard error: the real standard output carries the answers.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        message = json.loads(line)
        result = handlers[message.pop("do")](**message)
        print(json.dumps(result | {"now": time.time()}), file=answers, flush=True)
