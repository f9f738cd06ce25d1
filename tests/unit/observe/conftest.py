"""Records of small steps and a small validation, any field of which a test may replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tranship.observe.record import StepRecord, ValidationRecord, When


def _step_record(step: int, **changed: Any) -> StepRecord:
    fields: dict[str, Any] = {
        "step": step,
        "policy_version": step,
        "num_groups": 2,
        "num_groups_with_signal": 1,
        "dropped_groups": {"no_signal": 1},
        "rewards": np.array([1.0, 0.0, 1.0, 0.5], dtype=np.float32),
        "statuses": ("scored", "scored", "scored", "masked"),
        "reasons": (),
        "finish_reasons": ("stop", "stop", "stop", "length"),
        "response_lengths": np.array([2, 4, 6, 8]),
        "prompt_lengths": np.array([10, 10, 12, 12]),
        "advantages": np.array([1.0, -1.0, 0.5, -0.5]),
        "staleness": np.zeros(4, dtype=np.int64),
        "logprob_gap_max": 1e-5,
        "logprob_gap_mean": 1e-6,
        "train": {"pg_loss": 0.5, "clip_frac": 0.125, "learning_rate": 2e-5, "something_new": 7.0},
        "reward_extra": {"well_formed": 0.75},
        "timings_s": {"rollout": 1.0, "reward": 0.5, "train": 2.0},
        "dock_wait_s": 0.04,
        "tokens_generated": 20,
        "seconds": 4.0,
    }
    return StepRecord(**(fields | changed))


def _recorded_step(step: int, **changed: Any) -> StepRecord:
    fields: dict[str, Any] = {
        "num_groups_with_signal": 0,
        "dropped_groups": {},
        "rewards": np.zeros(0),
        "statuses": (),
        "finish_reasons": (),
        "response_lengths": np.zeros(0, dtype=np.int64),
        "prompt_lengths": np.zeros(0, dtype=np.int64),
        "advantages": np.zeros(0),
        "staleness": np.zeros(0, dtype=np.int64),
        "logprob_gap_max": None,
        "logprob_gap_mean": None,
        "train": {"loss": 0.6931, "grad_norm": 1.5, "num_tokens": 400, "learning_rate": 1e-6},
        "reward_extra": {},
        "timings_s": {"train": 2.0},
        "tokens_generated": 0,
    }
    return _step_record(step, **(fields | changed))


def _validation_record(when: When, step: int, score: float) -> ValidationRecord:
    return ValidationRecord(
        when=when,
        step=step,
        score=score,
        score_greedy=2 * score,
        num_prompts=8,
        samples_per_prompt=2,
        seconds=1.5,
        scores={"sums": score},
        extra={"well_formed": 0.5},
    )


@pytest.fixture
def step_record() -> Callable[..., StepRecord]:
    """Makes a StepRecord of 4 samples in 2 groups: (step, field=value, ...)."""
    return _step_record


@pytest.fixture
def recorded_step() -> Callable[..., StepRecord]:
    """Makes a StepRecord of a batch of recorded responses, which has no rewards: (step, field=value, ...)."""
    return _recorded_step


@pytest.fixture
def validation_record() -> Callable[..., ValidationRecord]:
    """Makes a ValidationRecord: (when, step, score)."""
    return _validation_record
