"""The reward stage: responses in, scores out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tranship.dock import DockClient, StaleLease
from tranship.rewards import RewardPool
from tranship.stages.stage import Renewal, Stopwatch
from tranship.types import SampleId, Score


def score_to_value(score: Score) -> dict[str, Any]:
    """A score as the dock carries it."""
    return {"status": score.status, "value": score.value, "reason": score.reason, "extra": score.extra}


@dataclass
class _Pending:
    lease: int
    samples: list[SampleId]
    scores: dict[SampleId, Score] = field(default_factory=dict)


class RewardStage:
    """Reads prompt_info, response and finish_reason; writes reward: a dict of status, value, reason and extra.

    Waits for generated groups; unblocks advantage and validate. The functions run in the pool's processes, so that a
    step here only hands out and collects.
    """

    name = "reward"

    def __init__(
        self,
        dock: DockClient,
        pool: RewardPool,
        *,
        decode: Callable[[np.ndarray], str],
        lease_s: float,
        watch: Stopwatch,
    ) -> None:
        self._dock = dock
        self._pool = pool
        self._decode = decode
        self._watch = watch
        self._renewal = Renewal(lease_s)
        self._pending: dict[int, _Pending] = {}

    def step(self) -> bool:
        """Hand new responses to the pool, and put the groups whose last score has come."""
        progress = self._submit_groups()
        for sample, score in self._pool.poll():
            assert isinstance(sample, SampleId), sample
            progress = True
            self._collect(sample, score)
        self._renew()
        return progress

    def close(self) -> None:
        """Stop the pool's processes."""
        self._pool.close()

    def _submit_groups(self) -> bool:
        progress = False
        while self._dock.changed_since_last_take(self.name):
            with self._watch.time("dock"):
                batch = self._dock.take(self.name, max_groups=1, kinds=("val", "train"))
            if batch is None:
                break
            progress = True
            group = batch.groups[0]
            self._pending[group.group_id] = _Pending(batch.lease, list(batch.ids))
            info = batch.group("prompt_info")[0]
            with self._watch.time("reward"):
                for sample, response in zip(batch.ids, batch["response"], strict=True):
                    self._pool.submit(
                        sample, info["data_source"], self._decode(response), info["ground_truth"], info["extra_info"]
                    )
        return progress

    def _collect(self, sample: SampleId, score: Score) -> None:
        pending = self._pending.get(sample.group_id)
        if pending is None:
            return
        pending.scores[sample] = score
        if len(pending.scores) < len(pending.samples):
            return
        del self._pending[sample.group_id]
        with self._watch.time("dock"):
            try:
                self._dock.put(
                    pending.samples,
                    {"reward": [score_to_value(pending.scores[sample]) for sample in pending.samples]},
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
