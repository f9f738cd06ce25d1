"""A dock of this process with one client, for stages that are tried on their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from tranship.config import AlgorithmConfig, RewardModelConfig
from tranship.dock import Dock, DockClient, StageNeeds
from tranship.stages import StageSpec, stage_table
from tranship.types import SampleId

PROMPT = np.array([5, 6, 7], dtype=np.int32)


class Rig:
    """The dock of an algorithm's table, and shorthands for what other stages would have written."""

    def __init__(self, algorithm: AlgorithmConfig, reward_model: RewardModelConfig, *, batch: int = 2) -> None:
        self.table = stage_table(algorithm, reward_model)
        self.dock = Dock(
            [StageNeeds(row.name, row.reads) for row in self.table],
            run_id="stages",
            batch_groups=batch,
            staleness=0,
            lease_s=60.0,
            slab_bytes=1 << 16,
            capacity_bytes=1 << 22,
            shared=False,
            ordered=True,
            refill=algorithm.dynamic_sampling,
        )
        self.client = DockClient(lambda method, *a, **k: getattr(self.dock, method)(*a, **k), "test", wait_s=0)
        self.events: list[dict] = []

    def row(self, name: str) -> StageSpec:
        return next(row for row in self.table if row.name == name)

    def admit(self, group_id: int, size: int, **info: object) -> None:
        columns = {"prompt": PROMPT, "prompt_info": {"text": "?", "data_source": "here", "ground_truth": 1, **info}}
        self.client.admit([(group_id, size, "train", columns)])

    def sampled(
        self, group_id: int, lengths: Sequence[int], rewards: Sequence[dict], *, masks: Sequence | None = None
    ) -> None:
        """What rollout and reward would have written of a group."""
        rows = [SampleId(group_id, index) for index in range(len(lengths))]
        of = [np.arange(length, dtype=np.int32) for length in lengths]
        columns = {
            "response": of,
            "response_mask": list(masks or [np.ones(length, dtype=bool) for length in lengths]),
            "logprobs": [np.full(length, -1.0, dtype=np.float32) for length in lengths],
            "policy_versions": [np.full(length, self.dock.version, dtype=np.int32) for length in lengths],
            "finish_reason": ["stop" for _ in lengths],
            "rollout_info": [{} for _ in lengths],
            "reward": list(rewards),
        }
        self.client.put(rows, columns, sampled_version=self.dock.version)


def scored(value: float, raw: float | None = None) -> dict:
    return {"status": "scored", "value": value, "raw": value if raw is None else raw, "reason": "", "extra": {}}


@pytest.fixture
def rig() -> Callable[..., Rig]:
    def make(algorithm: AlgorithmConfig, reward_model: RewardModelConfig | None = None, *, batch: int = 2) -> Rig:
        return Rig(algorithm, reward_model or RewardModelConfig(), batch=batch)

    return make
