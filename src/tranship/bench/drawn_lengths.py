"""The native engine with lengths of responses drawn beforehand: in workload L all sides do the same work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tranship.bench.workloads import drawn_length
from tranship.rollout.native.engine import NativeEngine
from tranship.rollout.native.requests import Group, Sample
from tranship.rollout.native.slots import Slots


class DrawnSlots(Slots):
    """Each sample's cap is its drawn length instead of the group's cap."""

    def add(self, group: Group, sample: Sample) -> int:
        """See `Slots.add`."""
        slot = super().add(group, sample)
        name = sample.sample
        self.cap[slot] = drawn_length(name.group_id, name.sample_index, group.sampling.max_response_tokens)
        return slot


class DrawnLengthsEngine(NativeEngine):
    """An entry for `rollout.engine` that takes what the native engine takes."""

    def __init__(self, model_dir: Path, **settings: Any) -> None:
        super().__init__(model_dir, **settings)
        slots = self._batch.slots
        self._batch.slots = DrawnSlots(slots.num_slots, slots.tokens.shape[1])
