"""Who has which rows, until when. Any message with a lease renews it; one that is silent for too long is over."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tranship.dock.errors import StaleLease
from tranship.dock.group import Group
from tranship.dock.take_policy import Key, key_of


@dataclass
class Lease:
    """Rows of one stage with one reader.

    keys: what the reader still has to finish, with their groups. pinned: every group that it was given. revoked: ids of
    groups that were taken away. window: of a batch, the ids of all its groups; dropped: those without rows.
    """

    id: int
    stage: str
    reader: str
    keys: dict[Key, Group]
    pinned: list[Group]
    deadline: float
    revoked: list[int] = field(default_factory=list)
    window: tuple[int, ...] | None = None
    dropped: list[int] = field(default_factory=list)

    @property
    def groups(self) -> dict[int, Group]:
        """The groups that the reader still has to finish, by id."""
        return {group.group_id: group for group in self.keys.values()}


class LeaseTable:
    """All leases. They all last equally long, so that the order of renewal is the order of the deadlines."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._leases: OrderedDict[int, Lease] = OrderedDict()
        self.next_id = 1

    def __len__(self) -> int:
        return len(self._leases)

    def open(self, stage: str, reader: str, keys: dict[Key, Group], now: float) -> Lease:
        """A new lease, which pins its groups."""
        pinned = list({group.group_id: group for group in keys.values()}.values())
        for group in pinned:
            group.pins += 1
        lease = Lease(self.next_id, stage, reader, keys, pinned, now + self._lease_s)
        self.next_id += 1
        self._leases[lease.id] = lease
        return lease

    def find(self, lease: int) -> Lease | None:
        """A lease, if it is not over."""
        return self._leases.get(lease)

    def get(self, lease: int) -> Lease:
        """A lease. StaleLease if it is over."""
        found = self._leases.get(lease)
        if found is None:
            raise StaleLease(f"lease {lease} is over: its rows were finished, have expired, or have left the dock")
        return found

    def renew(self, lease: Lease, now: float) -> None:
        """The lease lasts for its full time from now on."""
        lease.deadline = now + self._lease_s
        self._leases.move_to_end(lease.id)

    def renew_all(self, now: float) -> None:
        """All leases last for their full time from now on."""
        for lease in self._leases.values():
            lease.deadline = now + self._lease_s

    def close(self, lease: Lease) -> list[Group]:
        """The lease is over; returns the groups that have left the dock and that nobody looks at any more."""
        del self._leases[lease.id]
        for group in lease.pinned:
            group.pins -= 1
        return [group for group in lease.pinned if not group.here and not group.pins]

    def overdue(self, now: float) -> list[Lease]:
        """The leases whose deadline has passed, oldest first."""
        over = []
        for lease in self._leases.values():
            if lease.deadline > now:
                break
            over.append(lease)
        return over

    def next_deadline(self) -> float | None:
        """The earliest deadline; None without leases."""
        return next((lease.deadline for lease in self._leases.values()), None)

    def of_reader(self, reader: str) -> list[Lease]:
        """The leases of one reader."""
        return [lease for lease in self._leases.values() if lease.reader == reader]

    def pinned(self) -> Iterable[Group]:
        """The groups of all leases, those that have left the dock too; one may come up several times."""
        return (group for lease in self._leases.values() for group in lease.pinned)

    def dump(self, places: Mapping[Group, int]) -> list[Any]:
        """All leases in order, as plain values, for `load`; a pinned group is its place."""
        leases = [
            [
                *(lease.id, lease.stage, lease.reader, list(lease.keys), lease.deadline),
                [places[group] for group in lease.pinned],
                *(lease.revoked, lease.window, lease.dropped),
            ]
            for lease in self._leases.values()
        ]
        return [self.next_id, leases]

    def load(self, plain: Sequence[Any], groups: Sequence[Group]) -> None:
        """Go on from a dump, before anything else."""
        assert not self._leases, "leases in use cannot go on from a dump"
        self.next_id, leases = plain
        for lease_id, stage, reader, plain_keys, deadline, places, revoked, window, dropped in leases:
            pinned = [groups[place] for place in places]
            here = {group.group_id: group for group in pinned if group.here}
            keys = {key: here[key if isinstance(key, int) else key[0]] for key in map(key_of, plain_keys)}
            for group in pinned:
                group.pins += 1
            window = None if window is None else tuple(window)
            self._leases[lease_id] = Lease(lease_id, stage, reader, keys, pinned, deadline, revoked, window, dropped)
