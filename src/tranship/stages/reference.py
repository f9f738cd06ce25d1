"""The reference stage: responses in, the reference model's log-probs out. It is in the table only with a KL term."""

from __future__ import annotations

import numpy as np

from tranship.dock import DockClient, StaleLease
from tranship.stages.stage import Stopwatch
from tranship.train import TrainEngine


class ReferenceStage:
    """Reads prompt and response; writes ref_logprobs. Waits for generated groups; unblocks train."""

    name = "reference"

    def __init__(self, dock: DockClient, engine: TrainEngine, *, max_groups: int, watch: Stopwatch) -> None:
        self._dock = dock
        self._engine = engine
        self._max_groups = max_groups
        self._watch = watch

    def step(self) -> bool:
        """One forward pass over the groups that are ready."""
        if not self._dock.changed_since_last_take(self.name):
            return False
        with self._watch.time("dock"):
            batch = self._dock.take(self.name, max_groups=self._max_groups, kinds=("train",))
        if batch is None:
            return False
        prompts = batch.group("prompt")
        group_of = np.repeat(np.arange(len(batch.groups)), [group.size for group in batch.groups])
        with self._watch.time("reference"):
            logprobs = self._engine.logprobs(prompts, group_of, batch["response"])
        with self._watch.time("dock"):
            try:
                self._dock.put(batch.ids, {"ref_logprobs": logprobs}, lease=batch.lease)
                self._dock.ack(batch.lease)
            except StaleLease:
                return True
        return True

    def close(self) -> None:
        """Nothing is held."""
