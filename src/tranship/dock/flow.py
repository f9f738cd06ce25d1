"""The state of a dock and its transitions: what is lent, given back, dropped and freed. `Dock` speaks, this does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tranship.dock.bound import Bound
from tranship.dock.controller import Controller, Key
from tranship.dock.errors import StaleLease
from tranship.dock.group import OWN, Group
from tranship.dock.leases import Lease, LeaseTable
from tranship.dock.ledger import LOST, TOO_STALE, Ledger
from tranship.dock.messages import Admission, ExpiredLease, Take, Unit, Where
from tranship.dock.table import GroupTable, Ready
from tranship.dock.take_policy import FIRST_COME
from tranship.dock.window import Unfinished, Window

_EXPIRED_KEPT = 1000


class Flow:
    """Ties the table of groups, the leases, the window of the next batch and the ledger together.

    batch_stage: the stage that takes batches, once it is known. expired: leases that ended by time, the last ones.
    """

    def __init__(self, table: GroupTable, leases: LeaseTable, window: Window, clock: Callable[[], float]) -> None:
        self.table = table
        self.leases = leases
        self.window = window
        self.bound = Bound(window, table.tell)
        self.ledger = Ledger()
        self.batch_stage: str | None = None
        self.expired: deque[ExpiredLease] = deque(maxlen=_EXPIRED_KEPT)
        self._clock = clock

    def controller(self, stage: str, unit: Unit) -> Controller:
        """A stage's controller. ValueError for a stage that is unknown, or takes by another unit."""
        controller = self.table.controllers.get(stage)
        if controller is None:
            raise ValueError(f"no stage is called {stage!r}: there are {list(self.table.controllers)}")
        if controller.needs.unit != unit:
            raise ValueError(f"stage {stage!r} takes by {controller.needs.unit}, not by {unit}")
        return controller

    def group_of(self, key: Key) -> Group:
        """The group of a key that is here."""
        group = self.table.get(key if isinstance(key, int) else key[0])
        assert group is not None, key
        return group

    def admit(self, admission: Admission, attempt: int) -> None:
        """A new group with its own columns."""
        head = admission.group_id, admission.size, admission.kind, attempt
        group = Group(*head, admission.expected_tokens, self.window.version)
        if group.kind == "train":
            self.ledger.admit(group.group_id)
            self.window.admit(group.group_id)
        else:
            self.ledger.val_admitted += 1
        ready = self.table.admit(group)
        self.table.tell(group)
        ready += self.table.store(group, group.sample(OWN), admission.columns, admission.block)
        self.resolve(ready)

    def resolve(self, ready: Iterable[Ready]) -> None:
        """Tell the window which groups have become ready to be trained on."""
        for event in ready:
            if event.stage == self.batch_stage and event.group.kind == "train":
                self.window.resolve(event.group.group_id, self.bound.deadline(event.group))

    def bind_batch_stage(self, controller: Controller) -> None:
        """This stage takes batches; ValueError if another one does."""
        stage = controller.needs.name
        if controller.needs.policy != FIRST_COME:
            raise ValueError(
                f"stage {stage!r} takes batches: the policy {controller.needs.policy!r} has no effect there"
            )
        if self.batch_stage is None:
            self.batch_stage = stage
            self.resolve([Ready(stage, self.group_of(key)) for key in controller.ready("train")])
        elif self.batch_stage != stage:
            raise ValueError(f"batches go to stage {self.batch_stage!r}, not to {stage!r}")

    def starter(self, version: int) -> Callable[[Key], bool]:
        """A function that starts a group at a sampler's version if the bound allows it, and says whether it did."""

        def start(key: Key) -> bool:
            group = self.group_of(key)
            if not self.bound.may_declare(group, version, instead=True):
                return False
            self.bound.set_versions(group, version, group.published)
            return True

        return start

    def lend(self, controller: Controller, reader: str, keys: Sequence[Key]) -> Lease:
        """A lease on ready keys."""
        groups = {key: self.group_of(key) for key in keys}
        lease = self.leases.open(controller.needs.name, reader, groups, self._clock())
        controller.lend(keys, lease.id, reader)
        return lease

    def take_of(self, lease: Lease) -> Take:
        """What the reader of a new lease needs to know."""
        controller = self.table.controllers[lease.stage]
        groups, reads = lease.groups, controller.needs.reads
        known: dict[int, dict[str, Where]] = {}
        if controller.takes_groups:
            entries = tuple([group.entry(reads, None, known) for group in groups.values()])
        else:
            rows: dict[int, list[int]] = {group_id: [] for group_id in groups}
            for key in lease.keys:
                assert not isinstance(key, int), key
                rows[key[0]].append(key[1])
            entries = tuple(group.entry(reads, rows[group.group_id], known) for group in groups.values())
        window, num_dropped = lease.window or (), len(lease.dropped)
        return Take(lease.id, lease.stage, lease.deadline, self.window.version, entries, window, num_dropped)

    def lease(self, lease: int) -> Lease:
        """A lease, renewed. StaleLease if it is over, or if nothing of it is left."""
        entry = self.leases.get(lease)
        if entry.revoked and not entry.keys:
            self.close(entry)
            raise StaleLease(f"lease {lease} is over: its groups {entry.revoked} have left the dock")
        self.leases.renew(entry, self._clock())
        return entry

    def expire(self, speakers: Sequence[int]) -> bool:
        """End the leases whose time is over, except those of whoever speaks now; returns whether there were any."""
        overdue = [lease for lease in self.leases.overdue(self._clock()) if lease.id not in speakers]
        for lease in overdue:
            self.expired.append(ExpiredLease(lease.id, lease.stage, lease.reader, tuple(lease.groups)))
            self.put_back(lease)
        return bool(overdue)

    def renew_all(self) -> None:
        """All leases last for their full time from now on."""
        self.leases.renew_all(self._clock())

    def put_back(self, lease: Lease) -> None:
        """The rows of a lease are ready again. What was started under it, and not published, counts as not started."""
        self.table.controllers[lease.stage].put_back(lease.keys)
        groups = list(lease.groups.values())
        if lease.window is not None:
            for group in groups:
                group.in_batch = False
            self.window.give_back([(group.group_id, self.bound.deadline(group)) for group in groups], lease.dropped)
        for group in groups:
            if group.start_lease == lease.id:
                group.start_lease = None
                self.bound.set_versions(group, None, group.published)
        self.close(lease)
        for group in groups:
            if group.here and not group.in_batch and self.table.is_lost(group):
                self.begin_again(group)

    def close(self, lease: Lease) -> None:
        """A lease is over: its reader looks at nothing any more."""
        for group in self.leases.close(lease):
            self.table.free(group)

    def leave(self, group: Group, by: Lease | None) -> None:
        """A group leaves the dock. Leases other than `by` learn that they have lost it."""
        for lease_id, keys in self.table.leave(group).items():
            lease = self.leases.get(lease_id)
            for key in keys:
                del lease.keys[key]
            if lease is not by:
                lease.revoked.append(group.group_id)
        if not group.pins:
            self.table.free(group)

    def begin_again_what_is_lost(self) -> None:
        """A node is gone. Groups whose bytes were on it begin again, except those that are being trained on: whoever
        has these may have read them, and else gives them back."""
        for group in list(self.table.groups()):
            if not group.in_batch and self.table.is_lost(group):
                self.begin_again(group)

    def begin_again(self, group: Group) -> None:
        """A group has only its own columns left, as when it was admitted; who had rows of it has lost them. Without
        these it leaves."""
        own = self.table.own_columns(group)
        self.bound.set_versions(group, None, None)
        if any(self.table.is_lost_block(ref) for ref in own):
            self.drop(group, LOST, None)
            return
        if group.kind == "train":
            self.window.unresolve(group.group_id)
        head = group.group_id, group.size, group.kind, group.attempt
        again = Group(*head, group.expected_tokens, group.round)
        with self.table.held(own):
            self.leave(group, None)
            ready = self.table.admit(again)
            self.table.tell(again)
            for ref, columns in own.items():
                ready += self.table.store(again, again.sample(OWN), columns, ref)
        self.resolve(ready)

    def drop(self, group: Group, reason: str, by: Lease | None) -> None:
        """A group leaves for a reason; a training group's place in a batch stays, empty, or is given up to another."""
        deadline = self.bound.deadline(group)
        self.leave(group, by)
        if group.kind == "val":
            self.ledger.val_ended += 1
            return
        self.ledger.drop(group.group_id, reason)
        if by is not None and by.window is not None:
            self.window.bury_in_batch(group.group_id)
            by.dropped.append(group.group_id)
        elif self.window.refill:
            self.window.forget(group.group_id, deadline)
        else:
            self.window.bury(group.group_id, deadline)

    def discard(self, victims: Sequence[Unfinished]) -> None:
        """Drop started groups that cannot be waited for. Their places in a batch move to where there is room."""
        for victim in victims:
            self.bound.set_versions(self.group_of(victim.group_id), None, None)
        for victim in victims:
            self.drop(self.group_of(victim.group_id), TOO_STALE, None)

    def dump(self) -> dict[str, Any]:
        """Everything as plain values, for `load`. Groups that have left and that somebody still reads come last."""
        places = {group: place for place, group in enumerate(self.table.groups())}
        num_here = len(places)
        for group in self.leases.pinned():
            places.setdefault(group, len(places))
        column_sets: dict[tuple[str, ...], int] = {}
        return {
            "groups": [group.dump(column_sets) for group in places],
            "num_here": num_here,
            "column_sets": list(column_sets),
            "controllers": {name: controller.dump() for name, controller in self.table.controllers.items()},
            "leases": self.leases.dump(places),
            "window": self.window.dump(),
            "ledger": self.ledger.dump(),
            "batch_stage": self.batch_stage,
            "expired": [[one.lease, one.stage, one.reader, one.group_ids] for one in self.expired],
        }

    def load(self, plain: Mapping[str, Any]) -> None:
        """Go on from a dump, before anything else."""
        groups = [Group.load(group, plain["column_sets"]) for group in plain["groups"]]
        for group in groups[plain["num_here"] :]:
            group.here = False
        self.table.load(groups[: plain["num_here"]], plain["controllers"])
        self.leases.load(plain["leases"], groups)
        self.window.load(plain["window"])
        self.ledger.load(plain["ledger"])
        self.batch_stage = plain["batch_stage"]
        for lease, stage, reader, group_ids in plain["expired"]:
            self.expired.append(ExpiredLease(lease, stage, reader, tuple(group_ids)))
