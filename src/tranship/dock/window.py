"""What the next batch consists of. Groups of training that have not been consumed, and which of them are resolved.

A group is *resolved* when it can be trained on, or when it was dropped: its place in a batch then stays, empty (a
tombstone), so that a batch always consumes the same number of groups. Tombstones keep their group's deadline, so the
bound on staleness is met exactly as if they were trained on. With `refill` a dropped group gives its place up instead,
another one may be admitted for it, and every batch is full.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tranship.dock.policy import earliest_room, first_overfull, room_at

State = Literal["open", "leased", "trained"]


@dataclass(frozen=True)
class Unfinished:
    """A started group that cannot be trained on yet."""

    group_id: int
    deadline: int


class Window:
    """The choice of batches: `batch` groups each, with every group at most `staleness` versions old.

    ordered: the batch of version v consists of the ids [v * batch, (v + 1) * batch); otherwise of the resolved groups
    with the earliest deadlines. With refill an ordered batch is the first `batch` ids that were not dropped. state:
    whether the batch of `version` is with a reader, or has been trained on.
    """

    def __init__(self, batch: int, staleness: int, ordered: bool, refill: bool = False) -> None:
        self.batch = batch
        self.staleness = staleness
        self.ordered = ordered
        self.refill = refill
        self.version = 0
        self.state: State = "open"
        self.num_unconsumed = 0
        self._counts: Counter[int] = Counter()
        self._resolved: dict[int, int | None] = {}
        self._tombstones: dict[int, int] = {}
        self._heap: list[tuple[float, int]] = []
        self._waiting: list[int] = []  # Refilled and ordered: ids that are in no batch yet, sorted.

    @property
    def base(self) -> int:
        """The version of the next batch that can be taken."""
        return self.version + (self.state != "open")

    @property
    def newest_version(self) -> int:
        """The newest policy version whose weights exist."""
        return self.version + (self.state == "trained")

    @property
    def num_admissible(self) -> int:
        """How many more groups may be admitted."""
        return max(0, (self.staleness + 1) * self.batch - self.num_unconsumed)

    @property
    def tombstones(self) -> dict[int, int]:
        """The dropped groups that have not been consumed, and their deadlines."""
        return dict(self._tombstones)

    def admit(self, group_id: int) -> None:
        """A training group is here."""
        self.num_unconsumed += 1
        self._wait(group_id)

    def may_start(self, group_id: int, old: int | None, new: int) -> bool:
        """Whether a group with deadline `old` (None: not started) may get the deadline `new`."""
        if self.ordered:
            return self._due(group_id) <= new
        if old is not None and new >= old:
            return True
        others = self._counts if old is None else self._counts - Counter([old])
        return room_at(others, new, self.base, self.batch) > 0

    def move(self, group_id: int, old: int | None, new: int | None) -> None:
        """A group's deadline changes, or comes (from None) or goes (to None)."""
        if old == new:
            return
        self._remove(old)
        self._add(new)
        if group_id in self._resolved:
            self.resolve(group_id, new)

    def resolve(self, group_id: int, deadline: int | None) -> None:
        """A group can be trained on. Its deadline has been counted by `move`."""
        self._resolved[group_id] = deadline
        if not self.ordered:
            heapq.heappush(self._heap, (_sort_key(deadline), group_id))

    def bury(self, group_id: int, deadline: int | None) -> None:
        """A group that is not in a batch was dropped. Without a deadline of its own (None) it gets the earliest one."""
        if deadline is None:
            earliest = earliest_room(self._counts, self.base, self.batch)
            deadline = max(earliest, self._due(group_id)) if self.ordered else earliest
            self._add(deadline)
        self._tombstones[group_id] = deadline
        self.resolve(group_id, deadline)

    def forget(self, group_id: int, deadline: int | None) -> None:
        """A group that is not in a batch was dropped, and another one may be admitted in its place."""
        assert self.refill, f"group {group_id} keeps its place"
        self.num_unconsumed -= 1
        self._remove(deadline)
        self._resolved.pop(group_id, None)
        self._leave_line(group_id)

    def choose(self) -> list[int] | None:
        """The groups of the next batch, if they are resolved; None if that has to wait. Changes nothing."""
        if self.state != "open":
            return None
        if self.ordered:
            ids = self._next_ids()
            return ids if len(ids) == self.batch and all(group_id in self._resolved for group_id in ids) else None
        return self._earliest()

    def is_safe(self, chosen: Iterable[int]) -> bool:
        """Whether all others can still be trained on in time after this batch."""
        return self.ordered or first_overfull(self._without(chosen), self.version + 1, self.batch) is None

    def victims(self, chosen: Iterable[int], unfinished: Iterable[Unfinished]) -> list[Unfinished]:
        """The unfinished groups that cannot be waited for if this batch is taken: of those due first, the oldest."""
        rest = self._without(chosen)
        waiting = sorted(unfinished, key=lambda one: (one.deadline, one.group_id), reverse=True)
        victims = []
        while (overfull := first_overfull(rest, self.version + 1, self.batch)) is not None:
            assert waiting, "an infeasible rest without unfinished groups"
            victim = waiting.pop()
            assert victim.deadline <= overfull, f"{victim} is not the cause of an overfull version {overfull}"
            rest[victim.deadline] -= 1
            victims.append(victim)
        return victims

    def take(self, chosen: Iterable[int]) -> list[int]:
        """The batch is with a reader now; returns the dropped ones among its groups."""
        self.state = "leased"
        dropped = []
        for group_id in chosen:
            self._remove(self._resolved.pop(group_id))
            self._leave_line(group_id)
            if group_id in self._tombstones:
                dropped.append(group_id)
        return dropped

    def give_back(self, deadlines: Iterable[tuple[int, int | None]], dropped: Iterable[int]) -> None:
        """The batch was not trained on: (group id, deadline) of its groups, and ids of its tombstones."""
        self.state = "open"
        for group_id, deadline in [*deadlines, *((group_id, self._tombstones[group_id]) for group_id in dropped)]:
            self._add(deadline)
            self._wait(group_id)
            self.resolve(group_id, deadline)

    def bury_in_batch(self, group_id: int) -> None:
        """A group of the batch that is with a reader was dropped."""
        self._tombstones[group_id] = self.version + self.staleness

    def consume(self, dropped: Iterable[int]) -> None:
        """The batch has been trained on."""
        self.state = "trained"
        self.num_unconsumed -= self.batch
        for group_id in dropped:
            del self._tombstones[group_id]

    def advance(self) -> None:
        """The next version begins."""
        assert self.state == "trained", f"version {self.version} cannot end: its batch is {self.state}"
        self.version += 1
        self.state = "open"
        late = min(self._counts, default=self.version)
        assert late >= self.version, f"a group was due at version {late}, and version {self.version} begins"

    def restore(self, version: int, tombstones: Iterable[tuple[int, int]]) -> None:
        """Begin at a version, with the dropped groups that no batch has consumed. Another batch size is allowed."""
        self.version = version
        ordered = sorted(tombstones, key=lambda one: (one[1], one[0]))
        for place, (group_id, deadline) in enumerate(ordered):
            self.admit(group_id)
            due = self._due(group_id) if self.ordered else version + place // self.batch
            deadline = max(deadline, due)
            self._add(deadline)
            self.bury(group_id, deadline)

    def unresolve(self, group_id: int) -> None:
        """A group that is in no batch can no longer be trained on; its deadline has been taken off by `move`."""
        self._resolved.pop(group_id, None)

    def dump(self) -> list[Any]:
        """Everything as plain values, for `load`."""
        tables = (self._counts, self._resolved, self._tombstones)
        head = [self.version, self.state, self.num_unconsumed]
        return [*head, *(list(table.items()) for table in tables), self._waiting]

    def load(self, plain: Sequence[Any]) -> None:
        """Go on from a dump, before anything else."""
        assert not self.num_unconsumed, "a window in use cannot go on from a dump"
        self.version, self.state, self.num_unconsumed, counts, resolved, tombstones, self._waiting = plain
        self._counts, self._tombstones = Counter(dict(counts)), dict(tombstones)
        for group_id, deadline in resolved:
            self.resolve(group_id, deadline)

    def is_resolved(self, group_id: int) -> bool:
        """Whether a group can be trained on, or was dropped."""
        return group_id in self._resolved

    def _next_ids(self) -> list[int]:
        """The ids of the next batch of an ordered window, as far as they are known."""
        if self.refill:
            return self._waiting[: self.batch]
        return list(range(self.version * self.batch, (self.version + 1) * self.batch))

    def _due(self, group_id: int) -> int:
        """The version whose batch a group of an ordered window belongs to; with refill, the latest that it can be."""
        if self.refill:
            return self.base + bisect_left(self._waiting, group_id) // self.batch
        return group_id // self.batch

    def _wait(self, group_id: int) -> None:
        if self.refill and self.ordered:
            insort(self._waiting, group_id)

    def _leave_line(self, group_id: int) -> None:
        if self.refill and self.ordered:
            place = bisect_left(self._waiting, group_id)
            assert self._waiting[place : place + 1] == [group_id], f"group {group_id} does not wait for a batch"
            del self._waiting[place]

    def _earliest(self) -> list[int] | None:
        """The resolved groups with the earliest deadlines. Entries of the heap that no longer hold are thrown away."""
        chosen: dict[int, None] = {}
        entries = []
        while self._heap and len(chosen) < self.batch:
            entry = heapq.heappop(self._heap)
            key, group_id = entry
            if group_id in self._resolved and key == _sort_key(self._resolved[group_id]) and group_id not in chosen:
                chosen[group_id] = None
                entries.append(entry)
        for entry in entries:
            heapq.heappush(self._heap, entry)
        return list(chosen) if len(chosen) == self.batch else None

    def _without(self, chosen: Iterable[int]) -> Counter[int]:
        rest = Counter(self._counts)
        for group_id in chosen:
            deadline = self._resolved[group_id]
            if deadline is not None:
                rest[deadline] -= 1
        return rest

    def _add(self, deadline: int | None) -> None:
        if deadline is not None:
            self._counts[deadline] += 1

    def _remove(self, deadline: int | None) -> None:
        if deadline is not None:
            self._counts[deadline] -= 1
            if not self._counts[deadline]:
                del self._counts[deadline]


def _sort_key(deadline: int | None) -> float:
    return math.inf if deadline is None else float(deadline)
