"""The advantage stage: whole groups of rewards in, advantages out. Groups without signal end here, and are recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tranship.dock import Batch, DockClient, GroupView, StaleLease
from tranship.stages.stage import Emit, Stopwatch

# (rewards float64 [N], group_ids int64 [N]) -> advantages float32 [N]
Estimate = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class _Group:
    rows: range
    status: list[str]
    advantages: np.ndarray
    outcome: str


class AdvantageStage:
    """Reads reward and what a record of the sample shows; writes advantages and loss_mask.

    loss_mask is response_mask for scored samples and all False for masked and invalid ones, which enter no mean. A
    group without a scored sample is dropped as invalid, one whose advantages are all 0 as filtered (unless
    keep_without_signal). Waits for scored groups; unblocks train. Emits a `group` event with the samples' records.
    """

    name = "advantage"

    def __init__(
        self,
        dock: DockClient,
        *,
        estimate: Estimate,
        keep_without_signal: bool,
        describe: Callable[[Batch, int], dict[str, Any]],
        emit: Emit,
        watch: Stopwatch,
    ) -> None:
        self._dock = dock
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
        rewards = [batch["reward"][row] for row in view.rows]
        status = [reward["status"] for reward in rewards]
        scored = [index for index, reward in enumerate(rewards) if reward["status"] == "scored"]
        advantages = np.zeros(len(rewards), dtype=np.float32)
        if not scored:
            return _Group(view.rows, status, advantages, "invalid")
        values = np.array([rewards[index]["value"] for index in scored], dtype=np.float64)
        advantages[scored] = self._estimate(values, np.full(len(scored), view.group_id, dtype=np.int64))
        signal = bool(np.any(advantages != 0))
        return _Group(view.rows, status, advantages, "train" if signal or self._keep else "filtered")

    def _finish(self, batch: Batch, view: GroupView, group: _Group) -> None:
        with self._watch.time("dock"):
            if group.outcome == "train":
                masks = [batch["response_mask"][row] for row in view.rows]
                self._dock.put(
                    batch.ids,
                    {
                        "advantages": [
                            np.full(len(mask), advantage, dtype=np.float32)
                            for mask, advantage in zip(masks, group.advantages, strict=True)
                        ],
                        "loss_mask": [
                            np.array(mask) if status == "scored" else np.zeros(len(mask), dtype=bool)
                            for mask, status in zip(masks, group.status, strict=True)
                        ],
                    },
                    lease=batch.lease,
                )
                self._dock.ack(batch.lease)
            elif group.outcome == "filtered":
                self._dock.drop([view.group_id], "filtered", batch.lease)
            else:
                reasons = {batch["reward"][row]["reason"] or "masked" for row in view.rows}
                self._dock.drop([view.group_id], f"invalid:{min(reasons)}", batch.lease)

    def _event(self, batch: Batch, view: GroupView, group: _Group) -> dict[str, Any]:
        samples = []
        for row, advantage in zip(view.rows, group.advantages, strict=True):
            samples.append({**self._describe(batch, row), "advantage": float(advantage)})
        return {"kind": "group", "group_id": view.group_id, "outcome": group.outcome, "samples": samples}
