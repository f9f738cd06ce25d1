"""One stage's view of the dock: which rows wait for columns, which are ready, and which are with a reader.

A pure state machine over keys: a group id for a stage that takes whole groups, (group id, sample index) for one that
takes rows. Ready keys go to the stage's policy as they become ready, and nothing is ever searched: an event costs the
same however many rows the dock holds, or where the policy sorts, as much as that takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tranship.dock.messages import Kind, Load, StageNeeds
from tranship.dock.take_policy import Facts, Key, TakePolicy, key_of, policy_of

__all__ = ["Controller", "Key"]
_NOTHING = Facts()


@dataclass
class _Member:
    """A group at this stage, the keys of it that are not done, and the queue of its kind."""

    queue: TakePolicy
    keys: set[Key]
    facts: Facts = _NOTHING


class Controller:
    """The state of one stage."""

    def __init__(self, needs: StageNeeds) -> None:
        self.needs = needs
        self._members: dict[int, _Member] = {}
        self._missing: dict[Key, int] = {}
        make = policy_of(needs)
        self._queues: dict[Kind, TakePolicy] = {"train": make(), "val": make()}
        self._leased: dict[Key, int] = {}

    @property
    def takes_groups(self) -> bool:
        """Whether its keys are group ids."""
        return self.needs.unit == "group"

    @property
    def uses_facts(self) -> bool:
        """Whether it wants to be told the groups' facts."""
        return self._queues["train"].uses_facts

    def admit(self, group_id: int, size: int, kind: Kind) -> list[Key]:
        """A new group, which has no columns yet; returns the keys that are ready all the same."""
        keys: list[Key] = [group_id] if self.takes_groups else [(group_id, index) for index in range(size)]
        queue = self._queues[kind]
        self._members[group_id] = _Member(queue, set(keys))
        for key in keys:
            queue.admitted(key)
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
        member = self._members[_group_of(key)]
        member.queue.ready(key, member.facts)
        return True

    def tell(self, group_id: int, facts: Facts) -> None:
        """What is known of a group now; what was known of it before is forgotten."""
        member = self._members[group_id]
        member.facts = facts
        for key in member.keys:
            if key not in self._missing and key not in self._leased:
                member.queue.changed(key, facts)

    def ready(self, kind: Kind) -> list[Key]:
        """The ready keys, in the order they would be taken."""
        return self._queues[kind].order()

    def pick(
        self, kind: Kind, limit: int, may_take: Callable[[Key], bool], reader: str = "", load: Load | None = None
    ) -> tuple[list[Key], bool]:
        """Up to `limit` ready keys for a reader, as the policy chooses, and whether ready ones were refused by
        may_take. They stay ready until `lend`. load: what the reader says of itself."""
        return self._queues[kind].pick(reader, limit, may_take, load)

    def lend(self, keys: Iterable[Key], lease: int, reader: str = "") -> None:
        """These ready keys are with a reader now."""
        for key in keys:
            self._members[_group_of(key)].queue.lent(key, reader)
            self._leased[key] = lease

    def done(self, key: Key) -> None:
        """A reader has finished with a key."""
        del self._leased[key]
        member = self._members[_group_of(key)]
        member.keys.discard(key)
        member.queue.ended(key)

    def put_back(self, keys: Iterable[Key]) -> None:
        """A reader did not finish these keys: they are ready again, before others where the policy has no other order
        for them."""
        for key in reversed(list(keys)):
            del self._leased[key]
            member = self._members[_group_of(key)]
            member.queue.back(key, member.facts)

    def gone(self, reader: str) -> None:
        """A reader is no longer there; its leases have ended."""
        for queue in self._queues.values():
            queue.gone(reader)

    def better_elsewhere(self, reader: str, keys: Iterable[Key], load: Load | None) -> list[Key]:
        """Of keys that a reader has and did not begin, those that it should give back for others."""
        held = [key for key in keys if key in self._leased]
        better: list[Key] = []
        for queue in self._queues.values():
            mine = [key for key in held if self._members[_group_of(key)].queue is queue]
            better += queue.better_elsewhere(reader, mine, load)
        return better

    def forget(self, group_id: int) -> dict[Key, int]:
        """A group leaves; returns those of its keys that were with readers, and their leases."""
        lost: dict[Key, int] = {}
        member = self._members.pop(group_id)
        for key in member.keys:
            if key in self._leased:
                lost[key] = self._leased.pop(key)
            else:
                self._missing.pop(key, None)
            member.queue.ended(key)
        return lost

    def dump(self) -> list[Any]:
        """Which keys wait for columns, are ready (in order), or are with readers, as plain values, for `load`."""
        facts = [[i, *member.facts] for i, member in self._members.items() if member.facts != _NOTHING]
        queues = [[kind, queue.dump()] for kind, queue in self._queues.items()]
        return [list(self._missing.items()), queues, list(self._leased.items()), facts]

    def load(self, plain: Sequence[Any], kinds: Mapping[int, Kind]) -> None:
        """Go on from a dump, before anything else. kinds: the groups that are in the dock, and of which kind."""
        assert not self._members, "a controller in use cannot go on from a dump"
        missing, queues, leased, facts = plain
        self._members = {group_id: _Member(self._queues[kind], set()) for group_id, kind in kinds.items()}
        self._missing = {key_of(key): count for key, count in missing}
        self._leased = {key_of(key): lease for key, lease in leased}
        for kind, queue in queues:
            self._queues[kind].load(queue)
        for group_id, *known in facts:
            self._members[group_id].facts = Facts(*known)
        for key in chain(self._missing, self._leased, *(queue.order() for queue in self._queues.values())):
            self._members[_group_of(key)].keys.add(key)


def _group_of(key: Key) -> int:
    return key if isinstance(key, int) else key[0]
