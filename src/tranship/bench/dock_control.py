"""What the metadata plane of `bench dock` costs without payload: samples a second, and a take among many rows."""

from __future__ import annotations

import random
import time

from tranship.bench.dock_process import GROUP, make_dock
from tranship.bench.dock_work import COLUMNS
from tranship.dock import Admission, BlockRef, Dock, Publish
from tranship.dock.take_policy import FIRST_COME
from tranship.types import SampleId

_BATCH = 128  # groups


class _Plane:
    """A dock in this process, and blocks that nobody writes. Where the policy may look at them, rows have lengths."""

    def __init__(self, policy: str = FIRST_COME) -> None:
        self.dock: Dock = make_dock("bench-control", shared=False, policy=policy)
        self._lengths = None if policy == FIRST_COME else random.Random(0)
        lease = self.dock.lease_slab("writer", 1 << 10)
        assert lease is not None
        self.block = BlockRef(lease.slab, lease.generation, 64, 1 << 10)
        self.next = 0

    def publish(self, groups: int) -> float:
        """Admit groups and publish all columns of all their samples in one message; seconds of the publishing."""
        ids = range(self.next, self.next + groups)
        self.next += groups
        self.dock.admit([Admission(i, GROUP, "val", self.block, ()) for i in ids])
        rows = [SampleId(i, index) for i in ids for index in range(GROUP)]
        tokens = None if self._lengths is None else tuple(self._lengths.choices(range(100, 32768), k=len(rows)))
        start = time.perf_counter()
        self.dock.publish(Publish("writer", self.block, rows, COLUMNS, tokens=tokens))
        return time.perf_counter() - start

    def take(self, groups: int) -> float:
        """Take and acknowledge; seconds of both. The groups leave."""
        start = time.perf_counter()
        take = self.dock.take("read", "reader", max_groups=groups, kinds=("val",))
        assert take is not None
        self.dock.ack(take.lease)
        seconds = time.perf_counter() - start
        assert len(take.groups) == groups
        self.dock.finish_val([group.group_id for group in take.groups])
        return seconds


def samples_per_s(cycles: int) -> list[float]:
    """Samples a second of publish, take and acknowledgement, messages of 1,024 samples; one value per cycle."""
    plane = _Plane()
    rates = []
    for cycle in range(cycles + 3):
        seconds = plane.publish(_BATCH) + plane.take(_BATCH)
        if cycle >= 3:
            rates.append(_BATCH * GROUP / seconds)
    plane.dock.close()
    return rates


def take_seconds(rows: int, times: int, policy: str = FIRST_COME) -> list[float]:
    """Seconds of a take of one group with its acknowledgement, among so many ready rows, under a policy."""
    plane = _Plane(policy)
    for _ in range(rows // GROUP // _BATCH):
        plane.publish(_BATCH)
    seconds = []
    for _ in range(times):
        seconds.append(plane.take(1))
        plane.publish(1)
    plane.dock.close()
    return seconds
