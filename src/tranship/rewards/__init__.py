"""Scores of responses: reward functions by name, run in processes that can be killed. Imports no torch."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from tranship.rewards.pool import RewardPool
from tranship.rewards.request import RewardRequest
from tranship.rewards.shaping import overlong_penalty
from tranship.rewards.table import REWARDS
from tranship.rewards.terms import Term, terms_of

if TYPE_CHECKING:  # See tranship.rewards.terms.
    from tranship.config import RewardConfig

__all__ = ["REWARDS", "RewardPool", "RewardRequest", "Term", "make_pool", "overlong_penalty", "terms_of"]


def make_pool(
    reward: RewardConfig,
    *,
    wakeup: threading.Event | None = None,
    log_file: Path | None = None,
    num_workers: int | None = None,
) -> RewardPool:
    """The started pool of reward.function and reward.terms, of which there has to be one.

    num_workers: in place of reward.num_workers (1 is enough to check a configuration). Raises UserError where a name or
    an argument of any term is wrong, or its function cannot run here.
    """
    terms = terms_of(reward)
    return RewardPool(
        terms,
        num_workers or reward.num_workers,
        reward.timeout_s,
        concurrency=reward.concurrency,
        wakeup=wakeup,
        memory_bytes=None if reward.memory_mb is None else reward.memory_mb << 20,
        log_file=log_file,
    )
