"""The advantage stage: whole groups of rewards in, advantages out. Groups without signal end here, and are recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tranship.algorithms.estimate import Estimate, GroupRewards
from tranship.dock import Batch, DockClient, GroupView, StaleLease
from tranship.stages.stage import Emit, Stopwatch
from tranship.types import reason_class


@dataclass(frozen=True)
class _Group:
    """What became of a group. outcome: train, filtered, masked, invalid; columns: what is put, one entry per sample."""

    outcome: str
    columns: dict[str, list[np.ndarray]]
    advantages: np.ndarray
    metrics: dict[str, tuple[float, float]]


class AdvantageStage:
    """Reads reward, response_mask, logprobs (ref_logprobs, values) and what a record of the sample shows; writes
    advantages and loss_mask (returns).

    loss_mask is response_mask for scored samples and all False for masked and invalid ones, which enter no mean. A
    group without a scored sample is dropped as invalid (by the reason that most of its samples have) or masked, one
    whose raw rewards are all equal as filtered (unless keep_without_signal). Waits for scored groups; unblocks train.
    Emits a `group` event with the samples' records.
    """

    name = "advantage"

    def __init__(
        self,
        dock: DockClient,
        *,
        reads: tuple[str, ...],
        estimate: Estimate,
        keep_without_signal: bool,
        describe: Callable[[Batch, int], dict[str, Any]],
        emit: Emit,
        watch: Stopwatch,
    ) -> None:
        self._dock = dock
        self._reads = reads
        self._estimate = estimate
        self._keep = keep_without_signal
        self._describe = describe
        self._emit = emit
        self._watch = watch

    def step(self) -> bool:
        """All groups that are ready."""
        progress = False
        while self._dock.changed_since_last_take(self.name):
            with self._watch.time("dock"):
                batch = self._dock.take(self.name, max_groups=1, kinds=("train",))
            if batch is None:
                break
            progress = True
            with self._watch.time("advantage"):
                group = self._advantages(batch, batch.groups[0])
                event = self._event(batch, batch.groups[0], group)
            try:
                self._finish(batch, batch.groups[0], group)
            except StaleLease:
                continue
            self._emit(event)
        return progress

    def close(self) -> None:
        """Nothing is held."""

    def _advantages(self, batch: Batch, view: GroupView) -> _Group:
        rows = list(view.rows)
        rewards = [batch["reward"][row] for row in rows]
        scored = [place for place, reward in enumerate(rewards) if reward["status"] == "scored"]
        per_sample = np.zeros(len(rows), dtype=np.float32)
        if not scored:
            invalid = any(reward["status"] == "invalid" for reward in rewards)
            return _Group("invalid" if invalid else "masked", {}, per_sample, {})

        def of_scored(column: str) -> list[np.ndarray]:
            return [np.asarray(batch[column][rows[place]]) for place in scored]

        found = self._estimate(
            GroupRewards(
                group_id=view.group_id,
                rewards=np.array([rewards[place]["value"] for place in scored], dtype=np.float64),
                raw=np.array([_raw(rewards[place]) for place in scored], dtype=np.float64),
                masks=of_scored("response_mask"),
                logprobs=of_scored("logprobs"),
                ref_logprobs=of_scored("ref_logprobs") if "ref_logprobs" in self._reads else None,
                values=of_scored("values") if "values" in self._reads else None,
            )
        )
        masks = [np.asarray(batch["response_mask"][row]) for row in rows]
        columns = {
            "advantages": [np.zeros(len(mask), dtype=np.float32) for mask in masks],
            "loss_mask": [np.zeros(len(mask), dtype=bool) for mask in masks],
        }
        if found.returns is not None:
            columns["returns"] = [np.zeros(len(mask), dtype=np.float32) for mask in masks]
        for index, place in enumerate(scored):
            columns["advantages"][place] = found.advantages[index]
            columns["loss_mask"][place] = masks[place]
            if found.returns is not None:
                columns["returns"][place] = found.returns[index]
            kept = found.advantages[index][masks[place]]
            per_sample[place] = kept.mean() if len(kept) else 0.0
        outcome = "train" if found.has_signal or self._keep else "filtered"
        return _Group(outcome, columns, per_sample, found.metrics)

    def _finish(self, batch: Batch, view: GroupView, group: _Group) -> None:
        with self._watch.time("dock"):
            if group.outcome == "train":
                self._dock.put(batch.ids, group.columns, lease=batch.lease)
                self._dock.ack(batch.lease)
            elif group.outcome == "filtered":
                self._dock.drop([view.group_id], "filtered", batch.lease)
            elif group.outcome == "masked":
                self._dock.drop([view.group_id], "masked", batch.lease)
            else:
                rewards = [batch["reward"][row] for row in view.rows]
                reasons = Counter(reason_class(r["reason"]) for r in rewards if r["status"] == "invalid")
                most = min(reasons, key=lambda reason: (-reasons[reason], reason))
                self._dock.drop([view.group_id], f"invalid:{most}", batch.lease)

    def _event(self, batch: Batch, view: GroupView, group: _Group) -> dict[str, Any]:
        samples = []
        for row, advantage in zip(view.rows, group.advantages, strict=True):
            samples.append({**self._describe(batch, row), "advantage": float(advantage)})
        return {
            "kind": "group",
            "group_id": view.group_id,
            "outcome": group.outcome,
            "samples": samples,
            "metrics": group.metrics,
        }


def _raw(reward: dict[str, Any]) -> float:
    """The reward before shaping."""
    raw = reward.get("raw")
    return reward["value"] if raw is None else raw
