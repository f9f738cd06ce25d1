"""The recorded stage: responses that the data brings, in the place of rollout, reward and advantage (sft, dpo)."""

from __future__ import annotations

from typing import Any

import numpy as np

from tranship.dock import DockClient, StaleLease
from tranship.stages.stage import Emit, Stopwatch

# A demonstration is to become likelier; of a preference the chosen one, and the rejected one less likely.
_SIGNS = {1: (1.0,), 2: (1.0, -1.0)}


class RecordedStage:
    """Reads prompt and prompt_info; writes response, loss_mask and advantages.

    A group of one is a demonstration, with advantage 1; of two a preference, chosen (1) before rejected (-1). Waits for
    admitted groups; unblocks train (and reference). Emits a `group` event.
    """

    name = "recorded"

    def __init__(self, dock: DockClient, *, max_groups: int, emit: Emit, watch: Stopwatch) -> None:
        self._dock = dock
        self._max_groups = max_groups
        self._emit = emit
        self._watch = watch

    def step(self) -> bool:
        """All groups that are ready."""
        if not self._dock.changed_since_last_take(self.name):
            return False
        with self._watch.time("dock"):
            batch = self._dock.take(self.name, max_groups=self._max_groups, kinds=("train",))
        if batch is None:
            return False
        responses: list[np.ndarray] = []
        masks: list[np.ndarray] = []
        tokens: list[int] = []
        advantages: list[np.ndarray] = []
        events: list[dict[str, Any]] = []
        prompts, infos = batch.group("prompt"), batch.group("prompt_info")
        for group, prompt, info in zip(batch.groups, prompts, infos, strict=True):
            recorded, signs = info["recorded"], _SIGNS[group.size]
            assert len(recorded) == group.size, f"group {group.group_id} has {len(recorded)} recorded responses"
            for entry, sign in zip(recorded, signs, strict=True):
                responses.append(np.array(entry["token_ids"], dtype=np.int32))
                tokens.append(len(prompt) + len(responses[-1]))
                masks.append(np.array(entry["mask"], dtype=bool))
                advantages.append(np.full(len(responses[-1]), sign, dtype=np.float32))
            events.append(
                {"kind": "group", "group_id": group.group_id, "outcome": "train", "samples": [], "metrics": {}}
            )
        with self._watch.time("dock"):
            try:
                columns = {"response": responses, "loss_mask": masks, "advantages": advantages}
                self._dock.put(batch.ids, columns, lease=batch.lease, tokens=tokens)
                self._dock.ack(batch.lease)
            except StaleLease:
                return True
        for event in events:
            self._emit(event)
        return True

    def close(self) -> None:
        """Nothing is held."""
