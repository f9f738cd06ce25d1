"""Stages that run a model over finished responses and write one column: reference, value, reward_model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tranship.dock import DockClient, StaleLease
from tranship.dock.messages import Kind
from tranship.stages.stage import Stopwatch

# (prompts, group_of, responses) -> one value per response
Compute = Callable[[Sequence[np.ndarray], np.ndarray, Sequence[np.ndarray]], Sequence[Any] | np.ndarray]


class ForwardStage:
    """Reads prompt and response; writes `column`, what `compute` gives for each response.

    Waits for generated groups; unblocks whoever reads the column. Without gradients, and in whole groups, so that a
    prompt is computed once.
    """

    def __init__(
        self,
        name: str,
        column: str,
        dock: DockClient,
        compute: Compute,
        *,
        kinds: tuple[Kind, ...],
        max_groups: int,
        watch: Stopwatch,
    ) -> None:
        self.name = name
        self._column = column
        self._dock = dock
        self._compute = compute
        self._kinds = kinds
        self._max_groups = max_groups
        self._watch = watch

    def step(self) -> bool:
        """One forward pass over the groups that are ready."""
        if not self._dock.changed_since_last_take(self.name):
            return False
        with self._watch.time("dock"):
            batch = self._dock.take(self.name, max_groups=self._max_groups, kinds=self._kinds)
        if batch is None:
            return False
        prompts = batch.group("prompt")
        group_of = np.repeat(np.arange(len(batch.groups)), [group.size for group in batch.groups])
        with self._watch.time(self.name):
            values = self._compute(prompts, group_of, batch["response"])
        with self._watch.time("dock"):
            try:
                self._dock.put(batch.ids, {self._column: list(values)}, lease=batch.lease)
                self._dock.ack(batch.lease)
            except StaleLease:
                return True
        return True

    def close(self) -> None:
        """Nothing is held."""
