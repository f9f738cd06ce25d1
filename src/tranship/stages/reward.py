"""The reward stage: responses in, scores out."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tranship.config import RewardConfig
from tranship.dock import Batch, DockClient, StaleLease
from tranship.dock.messages import Kind
from tranship.rewards import RewardPool, RewardRequest, overlong_penalty
from tranship.rewards.scoring import invalid, sum_score, to_message
from tranship.stages.stage import Renewal, Stopwatch
from tranship.types import SampleId, Score, UserError


@dataclass(frozen=True)
class Facts:
    """What is known of a sample besides what its functions say. length: tokens of the response, all turns together.

    model_score, env_reward: None where there is no reward model, or the environment gave no reward. invalid: why the
    rollout itself is no sample; "" where it is one.
    """

    length: int
    finish_reason: str
    model_score: float | None = None
    env_reward: float | None = None
    invalid: str = ""


def final_score(functions: Score | None, facts: Facts, reward: RewardConfig, max_tokens: int) -> Score:
    """The Score of a sample: functions + reward.model.weight x model_score + env_reward, then the overlong penalty.

    functions: the pool's Score; None where no function runs. raw is the sum, value has the penalty too, and extra says
    what the model, the environment and the length gave: functions 1, model 0.5 of weight 2, length penalty -0.25 ->
    raw 2, value 1.75, {"reward_model": 0.5, "overlong": -0.25}. Invalid or masked functions stay so. With
    mask_truncated a scored response that reached its cap (finish_reason length) is masked, and keeps its raw.
    """
    if facts.invalid:
        return invalid(facts.invalid)
    if functions is not None and functions.status != "scored":
        return functions
    extra = dict(functions.extra) if functions is not None else {}
    parts = [] if functions is None or functions.value is None else [functions.value]
    if facts.model_score is not None:
        extra["reward_model"] = facts.model_score
        parts.append(reward.model.weight * facts.model_score)
    if facts.env_reward is not None:
        extra["env_reward"] = facts.env_reward
        parts.append(facts.env_reward)
    if not parts:
        return invalid("nothing gave a reward: no function, no reward model, and the environment gave none", extra)
    raw = sum_score(parts, extra)
    if raw.value is None:
        return raw
    if reward.mask_truncated and facts.finish_reason == "length":
        return Score("masked", extra=extra, raw=raw.value)
    overlong = reward.overlong
    if overlong.cache_tokens:
        extra["overlong"] = overlong_penalty(facts.length, max_tokens, overlong.cache_tokens, overlong.factor)
        return replace(sum_score([raw.value, extra["overlong"]], extra), raw=raw.value)
    return replace(raw, raw=raw.value)


@dataclass
class _Pending:
    lease: int
    facts: dict[SampleId, Facts]
    scores: dict[SampleId, Score] = field(default_factory=dict)


class RewardStage:
    """Reads prompt_info, response, finish_reason and rollout_info (model_score with a reward model); writes reward, a
    dict of status, value, raw, reason and extra (see `final_score`).

    Waits for generated groups; unblocks advantage and validate. The functions run in the pool's processes, so that a
    step here only hands out and collects. pool: None where no function is asked for. rollout_info may hold env_reward,
    a number that is added, and invalid, the reason for which the sample has no score: no function sees it then.
    """

    name = "reward"

    def __init__(
        self,
        dock: DockClient,
        pool: RewardPool | None,
        *,
        reward: RewardConfig,
        max_response_tokens: int,
        kinds: Sequence[Kind],
        decode: Callable[[np.ndarray], str],
        lease_s: float,
        watch: Stopwatch,
    ) -> None:
        if reward.overlong.cache_tokens > max_response_tokens:
            raise UserError(
                f"reward.overlong.cache_tokens {reward.overlong.cache_tokens} is more than "
                f"rollout.max_response_tokens {max_response_tokens}: use a smaller one"
            )
        self._dock = dock
        self._pool = pool
        self._reward = reward
        self._max_tokens = max_response_tokens
        self._kinds = tuple(kinds)
        self._decode = decode
        self._watch = watch
        self._renewal = Renewal(lease_s)
        self._pending: dict[int, _Pending] = {}

    def step(self) -> bool:
        """Hand new responses to the pool, and put the groups whose last score has come."""
        progress = self._submit_groups()
        for sample, score in self._pool.poll() if self._pool is not None else ():
            assert isinstance(sample, SampleId), sample
            progress = True
            self._collect(sample, score)
        self._renew()
        return progress

    def close(self) -> None:
        """Stop the pool's processes."""
        if self._pool is not None:
            self._pool.close()

    def _submit_groups(self) -> bool:
        progress = False
        while self._dock.changed_since_last_take(self.name):
            with self._watch.time("dock"):
                batch = self._dock.take(self.name, max_groups=1, kinds=self._kinds)
            if batch is None:
                break
            progress = True
            with self._watch.time("reward"):
                self._submit_group(batch)
        return progress

    def _submit_group(self, batch: Batch) -> None:
        facts = dict(zip(batch.ids, self._facts(batch), strict=True))
        self._pending[batch.groups[0].group_id] = _Pending(batch.lease, facts)
        info = batch.group("prompt_info")[0]
        for row, sample in enumerate(batch.ids):
            if self._pool is None or facts[sample].invalid:
                self._collect(sample, None)
            else:
                self._pool.submit(sample, self._request(batch, row, info))

    def _facts(self, batch: Batch) -> list[Facts]:
        with_model = self._reward.model.path is not None
        model_scores = [_number(score) for score in batch["model_score"]] if with_model else [None] * len(batch)
        return [
            Facts(
                len(response),
                reason,
                score,
                _number(info.get("env_reward")),
                str(info.get("invalid") or ""),
            )
            for response, reason, info, score in zip(
                batch["response"], batch["finish_reason"], batch["rollout_info"], model_scores, strict=True
            )
        ]

    def _request(self, batch: Batch, row: int, info: Mapping[str, Any]) -> RewardRequest:
        # With an environment the response holds what the world said too: a function judges the model's last turn.
        response = batch["response"][row][batch["rollout_info"][row].get("last_turn", 0) :]
        return RewardRequest(
            info["data_source"],
            self._decode(response),
            info["ground_truth"],
            info["extra_info"],
            prompt=info["text"],
            messages=info["messages"],
            num_tokens=len(batch["response"][row]),
            finish_reason=batch["finish_reason"][row],
            max_response_tokens=self._max_tokens,
            completion_ids=response.tolist(),
            rollout_info=batch["rollout_info"][row],
        )

    def _collect(self, sample: SampleId, score: Score | None) -> None:
        """Take a sample's score of the functions (None: none ran), and put its group if it was the last."""
        pending = self._pending.get(sample.group_id)
        if pending is None:
            return
        pending.scores[sample] = final_score(score, pending.facts[sample], self._reward, self._max_tokens)
        if len(pending.scores) < len(pending.facts):
            return
        del self._pending[sample.group_id]
        with self._watch.time("dock"):
            try:
                self._dock.put(
                    list(pending.facts),
                    {"reward": [to_message(pending.scores[sample]) for sample in pending.facts]},
                    lease=pending.lease,
                )
                self._dock.ack(pending.lease)
            except StaleLease:
                return

    def _renew(self) -> None:
        if not self._renewal.due():
            return
        for group_id, pending in list(self._pending.items()):
            try:
                self._dock.renew(pending.lease)
            except StaleLease:
                del self._pending[group_id]


def _number(value: Any) -> float | None:
    """A number of numpy's or Python's as a float; what is none, as NaN (which makes the sample invalid)."""
    if value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
