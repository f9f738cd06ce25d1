"""The two ends of a weight update. They know pieces and storages, no engine.

Split placement: the source publishes a version as immutable buckets, and each sink pulls them when it is ready; a sink
that missed versions takes the newest. Fused placement: the source pushes into the engine beside it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tranship.reshard.execute import StorageFn, new_buffer, pack, read_back, transfer, unpack
from tranship.reshard.plan import Plan
from tranship.reshard.verify import Arrival, Manifest
from tranship.types import RunError

_VERSIONS_KEPT = 2


@dataclass(frozen=True)
class Announcement:
    """A version that can be pulled: its manifest and a reference to each bucket's bytes, by the bucket's index."""

    version: int
    manifest: Manifest
    refs: Mapping[int, Any]


class WeightSource:
    """One training rank's end: reads its storages, which must not change while a method runs."""

    def __init__(self, plan: Plan, storage: StorageFn, rank: int = 0) -> None:
        self._plan = plan
        self._storage = storage
        self._rank = rank
        self._buckets = [bucket for bucket in plan.buckets if bucket.source_rank == rank]
        self._buffer = new_buffer(max((bucket.num_bytes for bucket in self._buckets), default=0))
        self._kept: deque[Announcement] = deque(maxlen=_VERSIONS_KEPT)

    def publish(self, version: int, put: Callable[[np.ndarray], Any]) -> Announcement:
        """Store every bucket of this rank as `version` and announce it. The last two versions stay alive here.

        put: stores a copy of a uint8 array and returns a reference to it.
        """
        self._check_newer(version)
        refs, digests = {}, {}
        for bucket in self._buckets:
            packed, digests[bucket.index] = pack(bucket, self._storage, self._buffer)
            refs[bucket.index] = put(packed.numpy())
        announcement = Announcement(version, Manifest(version, self._plan.key, digests), refs)
        self._kept.append(announcement)
        return announcement

    def _check_newer(self, version: int) -> None:
        if self._kept and version <= self._kept[-1].version:
            raise RunError(f"version {version} cannot be published after version {self._kept[-1].version}")

    def push(self, version: int, target: StorageFn) -> Manifest:
        """Write this rank's weights into the storages of the target in the same process, and verify them there.

        Each bucket is read again in the target and its digest compared with that of what was sent. Raises RunError if
        one differs: the target then holds a mixture and must not be used.
        """
        assert all(bucket.source_rank == bucket.target_rank for bucket in self._plan.buckets), "other ranks take part"
        digests: dict[int, str] = {}
        manifest = Manifest(version, self._plan.key, digests)
        arrival = Arrival(self._plan, manifest, self._rank)
        for bucket in self._buckets:
            digests[bucket.index], found = transfer(bucket, self._storage, target, self._buffer)
            arrival.accept(bucket, found)
        arrival.complete()
        return manifest


class WeightSink:
    """One sampling rank's end: takes versions into its storages, whole or not at all."""

    def __init__(self, plan: Plan, storage: StorageFn, rank: int = 0) -> None:
        self._plan = plan
        self._storage = storage
        self._rank = rank
        self._buckets = [bucket for bucket in plan.buckets if bucket.target_rank == rank]
        self.version: int | None = None

    def pull(self, announcements: list[Announcement], get: Callable[[Any], np.ndarray]) -> int:
        """Take over one version, announced by every source rank; returns it.

        get: the array behind a reference. Raises RunError if a bucket is damaged, missing or there twice: `version` is
        None from the first written byte until all of them are there and right, and the storages must not be used.
        """
        manifest, refs = self._merge(announcements)
        arrival = Arrival(self._plan, manifest, self._rank)
        self.version = None
        for bucket in self._buckets:
            if bucket.index not in refs:
                continue
            buffer = _as_tensor(get(refs[bucket.index]))
            if buffer.numel() != bucket.num_bytes:
                raise RunError(
                    f"version {manifest.version}, bucket {bucket.index} has {buffer.numel()} bytes, "
                    f"not {bucket.num_bytes}"
                )
            arrival.accept(bucket, unpack(bucket, buffer, self._storage))
        self.version = arrival.complete()
        return self.version

    def _merge(self, announcements: list[Announcement]) -> tuple[Manifest, dict[int, Any]]:
        """One manifest and all references, from those of the source ranks. They must be of one version and plan."""
        assert announcements, "nothing was announced"
        first = announcements[0].manifest
        digests: dict[int, str] = {}
        refs: dict[int, Any] = {}
        for announcement in announcements:
            manifest = announcement.manifest
            if (manifest.version, manifest.plan_key) != (first.version, first.plan_key):
                raise RunError(
                    f"source ranks announced versions {first.version} and {manifest.version} "
                    f"(plans {first.plan_key} and {manifest.plan_key}): a version must come from one moment"
                )
            if twice := refs.keys() & announcement.refs.keys():
                raise RunError(f"version {first.version}, bucket {min(twice)} was announced twice")
            digests |= manifest.digests
            refs |= announcement.refs
        return Manifest(first.version, first.plan_key, digests), refs


def check_landed(plan: Plan, manifest: Manifest, target: StorageFn, rank: int = 0) -> None:
    """Read all of a version again in the target's storages; raises RunError if something is not what was sent.

    It finds what no check on the way can: storages that share memory, and writes that came later.
    """
    arrival = Arrival(plan, manifest, rank)
    buckets = [bucket for bucket in plan.buckets if bucket.target_rank == rank]
    buffer = new_buffer(max((bucket.num_bytes for bucket in buckets), default=0))
    for bucket in buckets:
        arrival.accept(bucket, read_back(bucket, target, buffer))
    arrival.complete()


class _Writable:
    """An array's memory offered as writable, so that torch takes a read-only array without a warning."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.__array_interface__ = array.__array_interface__ | {"data": (array.ctypes.data, False)}


def _as_tensor(array: np.ndarray) -> torch.Tensor:
    """A tensor uint8 on the array's memory. It is only read."""
    return torch.from_numpy(np.asarray(_Writable(array)))
