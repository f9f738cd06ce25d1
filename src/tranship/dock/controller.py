"""One stage's view of the dock: which rows wait for columns, which are ready, and which are with a reader.

A pure state machine over keys: a group id for a stage that takes whole groups, (group id, sample index) for one that
takes rows. Every event costs the same however many rows the dock holds: ready keys are queued as they become ready, and
nothing is ever searched. Keys that come back are handed out before others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from tranship.dock.messages import Kind, StageNeeds

Key = int | tuple[int, int]


@dataclass
class _Queue:
    """Ready keys: those that came back from a reader, and those that are new."""

    again: OrderedDict[Key, None] = field(default_factory=OrderedDict)
    new: OrderedDict[Key, None] = field(default_factory=OrderedDict)


@dataclass
class _Member:
    """A group at this stage, and the keys of it that are not done."""

    kind: Kind
    keys: set[Key]


class Controller:
    """The state of one stage."""

    def __init__(self, needs: StageNeeds) -> None:
        self.needs = needs
        self._members: dict[int, _Member] = {}
        self._missing: dict[Key, int] = {}
        self._queues: dict[Kind, _Queue] = {"train": _Queue(), "val": _Queue()}
        self._leased: dict[Key, int] = {}

    @property
    def takes_groups(self) -> bool:
        """Whether its keys are group ids."""
        return self.needs.unit == "group"

    def admit(self, group_id: int, size: int, kind: Kind) -> list[Key]:
        """A new group, which has no columns yet; returns the keys that are ready all the same."""
        keys: list[Key] = [group_id] if self.takes_groups else [(group_id, index) for index in range(size)]
        self._members[group_id] = _Member(kind, set(keys))
        for key in keys:
            self._missing[key] = len(set(self.needs.reads)) + 1
        return [key for key in keys if self.arrived(key)]

    def arrived(self, key: Key, count: int = 1) -> bool:
        """That many more columns that this stage reads are complete for a key; returns whether it is ready now."""
        missing = self._missing.get(key)
        if missing is None:
            return False
        if missing > count:
            self._missing[key] = missing - count
            return False
        del self._missing[key]
        self._queue(key).new[key] = None
        return True

    def ready(self, kind: Kind) -> list[Key]:
        """The ready keys, in the order they would be taken."""
        queue = self._queues[kind]
        return [*queue.again, *queue.new]

    def pick(self, kind: Kind, limit: int, may_take: Callable[[Key], bool]) -> tuple[list[Key], bool]:
        """Up to `limit` ready keys, and whether ready ones were refused by may_take. They stay queued until `lend`.

        New keys are alike to may_take: the first one that it refuses ends the search.
        """
        queue = self._queues[kind]
        picked: list[Key] = []
        refused = False
        for key in queue.again:
            if len(picked) == limit:
                return picked, refused
            if may_take(key):
                picked.append(key)
            else:
                refused = True
        for key in queue.new:
            if len(picked) == limit:
                break
            if not may_take(key):
                return picked, True
            picked.append(key)
        return picked, refused

    def lend(self, keys: Iterable[Key], lease: int) -> None:
        """These ready keys are with a reader now."""
        for key in keys:
            self._unqueue(key)
            self._leased[key] = lease

    def done(self, key: Key) -> None:
        """A reader has finished with a key."""
        del self._leased[key]
        self._members[_group_of(key)].keys.discard(key)

    def put_back(self, keys: Iterable[Key]) -> None:
        """A reader did not finish these keys: they go to the front, in their order."""
        for key in reversed(list(keys)):
            del self._leased[key]
            queue = self._queue(key)
            queue.again[key] = None
            queue.again.move_to_end(key, last=False)

    def forget(self, group_id: int) -> dict[Key, int]:
        """A group leaves; returns those of its keys that were with readers, and their leases."""
        lost: dict[Key, int] = {}
        member = self._members[group_id]
        for key in member.keys:
            if key in self._leased:
                lost[key] = self._leased.pop(key)
            elif self._missing.pop(key, None) is None:
                self._unqueue(key)
        del self._members[group_id]
        return lost

    def dump(self) -> list[Any]:
        """Which keys wait for columns, are ready (in order), or are with readers, as plain values, for `load`."""
        queues = [[kind, list(queue.again), list(queue.new)] for kind, queue in self._queues.items()]
        return [list(self._missing.items()), queues, list(self._leased.items())]

    def load(self, plain: Sequence[Any], kinds: Mapping[int, Kind]) -> None:
        """Go on from a dump, before anything else. kinds: the groups that are in the dock, and of which kind."""
        assert not self._members, "a controller in use cannot go on from a dump"
        missing, queues, leased = plain
        self._members = {group_id: _Member(kind, set()) for group_id, kind in kinds.items()}
        self._missing = {key_of(key): count for key, count in missing}
        self._leased = {key_of(key): lease for key, lease in leased}
        for kind, again, new in queues:
            self._queues[kind].again.update(dict.fromkeys(map(key_of, again)))
            self._queues[kind].new.update(dict.fromkeys(map(key_of, new)))
        queued = [keys for queue in self._queues.values() for keys in (queue.again, queue.new)]
        for key in chain(self._missing, self._leased, *queued):
            self._members[_group_of(key)].keys.add(key)

    def _queue(self, key: Key) -> _Queue:
        return self._queues[self._members[_group_of(key)].kind]

    def _unqueue(self, key: Key) -> None:
        queue = self._queue(key)
        if key in queue.again:
            del queue.again[key]
        else:
            del queue.new[key]


def key_of(plain: Any) -> Key:
    """The key that a dump holds."""
    return plain if type(plain) is int else (plain[0], plain[1])


def _group_of(key: Key) -> int:
    return key if isinstance(key, int) else key[0]
