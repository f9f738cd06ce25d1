"""Which groups may start and which may be trained on now: the bound on staleness, as pure arithmetic.

A group whose oldest token is of policy version w may be trained on at versions up to its deadline w + K. One batch of B
groups is trained on at each version, so earliest-deadline-first scheduling says when a set of started groups can still
be served in time: with the next batch at version v, for every d >= v at most (d - v + 1) * B of them may have a
deadline <= d (Liu and Layland 1973 for unit jobs: feasible if and only if no interval is over-full).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator


def feasible(deadlines: Iterable[int], version: int, batch: int) -> bool:
    """Whether groups with these deadlines can all be trained on in time, if the batch of `version` is the next one."""
    return first_overfull(Counter(deadlines), version, batch) is None


def first_overfull(counts: Counter[int], version: int, batch: int) -> int | None:
    """The first deadline up to which more groups are due than batches of `version` and later have room for."""
    for deadline, due in _due(counts):
        if due > (deadline - version + 1) * batch:
            return deadline
    return None


def room_at(counts: Counter[int], deadline: int, version: int, batch: int) -> int:
    """How many more groups may have that deadline (0: none), if `counts` is feasible at `version`."""
    if deadline < version:
        return 0
    before = sum(count for other, count in counts.items() if other <= deadline)
    room = (deadline - version + 1) * batch - before
    for other, due in _due(counts):
        if other > deadline:
            room = min(room, (other - version + 1) * batch - due)
    return max(0, room)


def earliest_room(counts: Counter[int], version: int, batch: int) -> int:
    """The earliest deadline, from `version` on, that one more group may have."""
    deadline = version
    while not room_at(counts, deadline, version, batch):
        deadline += 1
    return deadline


def _due(counts: Counter[int]) -> Iterator[tuple[int, int]]:
    """(deadline, groups due by then) for each deadline that a group has, in order."""
    due = 0
    for deadline in sorted(counts):
        due += counts[deadline]
        if counts[deadline]:
            yield deadline, due
