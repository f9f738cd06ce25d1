from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tranship.dock import Batch, Dock, DockClient, StageNeeds
from tranship.types import SampleId

STAGES = (
    StageNeeds("rollout", ("prompt",)),
    StageNeeds("score", ("prompt", "response"), "row"),
    StageNeeds("train", ("prompt", "response", "reward")),
    StageNeeds("validate", ("response", "reward")),
)


class Clock:
    """Seconds that pass only when they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def prompt_of(group_id: int) -> np.ndarray:
    return np.full(3, group_id % 1000, dtype=np.int32)


def response_of(sample: SampleId) -> np.ndarray:
    """Distinct content and length for every row, so that a mix-up shows."""
    return np.arange(sample.group_id % 7 + sample.sample_index, dtype=np.int32) + 1000 * abs(sample.group_id)


@dataclass
class Rig:
    """A dock of this process with a client, a clock, and shorthands for what the stages of the tests do."""

    dock: Dock
    client: DockClient
    clock: Clock
    size: int = 2
    next_id: int = 0
    trained: list[int] = field(default_factory=list)

    def admit(self, count: int | None = None) -> list[int]:
        """New training groups, with the ids that come next (None: as many as may be admitted)."""
        room = self.dock.num_admissible()
        ids = list(range(self.next_id, self.next_id + (room if count is None else count)))
        groups = [(group_id, self.size, "train", {"prompt": prompt_of(group_id)}) for group_id in ids]
        self.client.admit(groups, [1 + group_id * 7 % 5 for group_id in ids])
        self.next_id += len(ids)
        return ids

    def start(self, count: int = 1, version: int | None = None) -> Batch | None:
        """Groups to sample, at the dock's version if none is given."""
        version = self.dock.version if version is None else version
        return self.client.take("rollout", max_groups=count, version=version)

    def generate(self, batch: Batch, sampled_version: int | None = None) -> None:
        """The responses of taken groups, and the acknowledgement."""
        responses = [response_of(sample) for sample in batch.ids]
        self.client.put(batch.ids, {"response": responses}, batch.lease, sampled_version)
        self.client.ack(batch.lease)

    def score(self, max_rows: int = 1000) -> int:
        """Score the rows that are ready; returns how many."""
        batch = self.client.take_rows("score", max_rows=max_rows)
        if batch is None:
            return 0
        check_content(batch)
        self.client.put(batch.ids, {"reward": [{"value": float(i)} for i in range(len(batch.ids))]}, batch.lease)
        self.client.ack(batch.lease)
        return len(batch.ids)

    def make_ready(self, count: int | None = None) -> list[int]:
        """Admit, generate and score groups at the dock's version."""
        ids = self.admit(count)
        while (batch := self.start(len(ids) or 1)) is not None:
            self.generate(batch)
        self.score()
        return ids

    def take_batch(self) -> Batch | None:
        return self.client.take_batch("train", groups=self.dock._flow.window.batch)

    def train(self) -> list[int]:
        """One whole step; returns the window."""
        batch = self.take_batch()
        assert batch is not None, "no batch can be taken"
        check_content(batch)
        self.client.check([batch.lease])
        self.trained += self.client.trained(batch.lease)
        self.client.advance(self.dock.version + 1)
        return list(batch.window)


def check_content(batch: Batch) -> None:
    """Every value that was read is the one that was written for that very row."""
    for group, prompt in zip(batch.groups, batch.group("prompt"), strict=True):
        np.testing.assert_array_equal(prompt, prompt_of(group.group_id))
    for sample, response in zip(batch.ids, batch["response"], strict=True):
        np.testing.assert_array_equal(response, response_of(sample))


@pytest.fixture
def make_rig() -> Any:
    """A function that makes a Rig; the docks are closed at the end."""
    docks: list[Dock] = []

    def make(
        *,
        batch_groups: int = 2,
        staleness: int = 0,
        size: int = 2,
        lease_s: float = 10.0,
        slab_bytes: int = 1 << 14,
        capacity_bytes: int = 1 << 20,
        ordered: bool = False,
        on_stale: Any = "finish_first",
        stages: tuple[StageNeeds, ...] = STAGES,
        run_id: str = "test",
    ) -> Rig:
        clock = Clock()
        dock = Dock(
            stages,
            run_id=run_id,
            batch_groups=batch_groups,
            staleness=staleness,
            on_stale=on_stale,
            lease_s=lease_s,
            slab_bytes=slab_bytes,
            capacity_bytes=capacity_bytes,
            shared=False,
            ordered=ordered,
            clock=clock,
        )
        docks.append(dock)
        return Rig(dock, DockClient(caller(dock), "worker", wait_s=0), clock, size)

    yield make
    for dock in docks:
        dock.close()


def caller(dock: Dock) -> Callable[..., Any]:
    """How a client in this process reaches a dock."""
    return lambda method, *args, **kwargs: getattr(dock, method)(*args, **kwargs)


@pytest.fixture
def client_of() -> Callable[..., DockClient]:
    """Another client of a rig's dock."""
    return lambda rig, owner: DockClient(caller(rig.dock), owner, wait_s=0)
