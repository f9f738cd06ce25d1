"""What a step and a validation tell the observers: plain typed records, filled by the coordinator. Knows no dock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tranship.observe.scores import Estimate
from tranship.types import FinishReason, RewardStatus, reason_class

When = Literal["before", "during", "after"]


def _empty() -> np.ndarray:
    return np.zeros(0, dtype=np.float32)


@dataclass(frozen=True)
class StepRecord:
    """All that is known of one trained batch; N samples in G groups, those that were dropped included.

    A batch of recorded responses (SFT, DPO) has no rewards: N is 0, and its numbers are in `train`.

    step: counts from 1. policy_version: after this step's update. num_groups: groups that this step used up.
    num_groups_with_signal: those whose advantages are not all 0. dropped_groups: reason -> groups that were not
    trained on ("no_signal", "too_stale", "invalid", ...).
    raw_rewards: as rewards, before shaping (nothing given: they are the same).
    rewards: float [N], read only where `statuses` says "scored". statuses, reasons, finish_reasons: N strings
    (reason "" unless invalid). response_lengths: int [N], tokens. prompt_lengths: int [N] or [G], tokens.
    advantages: float [N] or one per token. staleness: int [N], (version at use) - (oldest version of a token).
    logprob_gap_max, logprob_gap_mean: |trainer - sampler| over tokens of the current version; None if not measured.
    train: what `TrainEngine.update` returned, the critic's under "critic_<name>". reward_extra: means of the further
    numbers of the reward ("well_formed"). reward_by_source: data source -> mean of its scored rewards. rollout_extra:
    means of what the environment counted ("turns", "tool_calls", "tool_errors"). data: counters of the prompt stream
    ("prompts_dropped", "epoch", "position"). timings_s: stage -> busy seconds ("rollout", "reward", "reference",
    "advantage", "train", "reshard", ...). dock_wait_s: seconds in which stages waited for the dock's own work.
    seconds: wall time from the end of the step before (or the start of training) to the end of this one.
    tokens_generated: response tokens that the samplers made in that time. rss_bytes: resident memory of all
    processes. num_devices: what throughput is divided by. ledger: groups since the start of the run by what became of
    them ("admitted", "trained", "in_flight", "dropped/<reason>").
    """

    step: int
    policy_version: int
    num_groups: int
    num_groups_with_signal: int
    rewards: np.ndarray
    statuses: Sequence[RewardStatus]
    finish_reasons: Sequence[FinishReason]
    response_lengths: np.ndarray
    prompt_lengths: np.ndarray
    tokens_generated: int
    seconds: float
    timings_s: Mapping[str, float]
    train: Mapping[str, float]
    reasons: Sequence[str] = ()
    dropped_groups: Mapping[str, int] = field(default_factory=dict)
    advantages: np.ndarray = field(default_factory=_empty)
    staleness: np.ndarray = field(default_factory=_empty)
    logprob_gap_max: float | None = None
    logprob_gap_mean: float | None = None
    reward_extra: Mapping[str, float] = field(default_factory=dict)
    reward_by_source: Mapping[str, float] = field(default_factory=dict)
    rollout_extra: Mapping[str, float] = field(default_factory=dict)
    data: Mapping[str, float] = field(default_factory=dict)
    dock_wait_s: float = 0.0
    rss_bytes: int = 0
    num_devices: int = 1
    ledger: Mapping[str, float] = field(default_factory=dict)
    raw_rewards: np.ndarray = field(default_factory=_empty)

    def __post_init__(self) -> None:
        lengths = {len(self.rewards), len(self.statuses), len(self.finish_reasons), len(self.response_lengths)}
        assert len(lengths) == 1, f"step {self.step}: columns of different lengths {sorted(lengths)}"
        assert not self.reasons or len(self.reasons) in lengths, f"step {self.step}: {len(self.reasons)} reasons"

    @property
    def has_rewards(self) -> bool:
        """Whether samples were scored at all; False for a batch of recorded responses."""
        return len(self.rewards) > 0

    @property
    def scored_rewards(self) -> np.ndarray:
        """float64 [number scored]: the rewards that exist."""
        scored = np.array([status == "scored" for status in self.statuses], dtype=bool)
        return np.asarray(self.rewards, dtype=np.float64)[scored]

    @property
    def scored_raw(self) -> np.ndarray:
        """float64 [number scored]: the rewards before any shaping, where they are known apart."""
        if len(self.raw_rewards) != len(self.statuses):
            return self.scored_rewards
        scored = np.array([status == "scored" for status in self.statuses], dtype=bool)
        return np.asarray(self.raw_rewards, dtype=np.float64)[scored]

    @property
    def invalid_by_reason(self) -> dict[str, int]:
        """Invalid samples of this step by the class of their reason ("unknown" where none was given)."""
        reasons = self.reasons or [""] * len(self.statuses)
        counts: dict[str, int] = {}
        for status, reason in zip(self.statuses, reasons, strict=True):
            if status == "invalid":
                counts[reason_class(reason)] = counts.get(reason_class(reason), 0) + 1
        return counts


@dataclass(frozen=True)
class ValidationRecord:
    """Scores on held-out prompts at one moment.

    when: "before" the first step, "during", or "after" the last. step: trained batches so far. score: mean score of
    the sampled responses before any shaping (accuracy where scores are 0 or 1), over prompts; score_greedy: of one
    greedy response each, or None. scores: data source -> the same under sampling. samples_per_prompt: for the metric's
    name. extra, extra_greedy: means of the further numbers of the reward. invalid: reason -> samples, and masked: how
    many (they enter no mean). statistics, statistics_greedy: name ("mean@4", "pass@2", "maj@4") -> estimate, as
    `observe.scores.statistics`; by_source, by_source_greedy: data source -> the same. no_majority: why there is no
    maj@k, or "".
    """

    when: When
    step: int
    score: float
    score_greedy: float | None
    num_prompts: int
    samples_per_prompt: int
    seconds: float
    scores: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, float] = field(default_factory=dict)
    extra_greedy: Mapping[str, float] = field(default_factory=dict)
    invalid: Mapping[str, int] = field(default_factory=dict)
    masked: int = 0
    statistics: Mapping[str, Estimate] = field(default_factory=dict)
    statistics_greedy: Mapping[str, Estimate] = field(default_factory=dict)
    by_source: Mapping[str, Mapping[str, Estimate]] = field(default_factory=dict)
    by_source_greedy: Mapping[str, Mapping[str, Estimate]] = field(default_factory=dict)
    no_majority: str = ""
