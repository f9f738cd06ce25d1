"""What the dock has lent to a stage's controller outside its process: which of it is ready, with a reader, or done."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from tranship.dock.controller import Key
from tranship.dock.errors import StaleLease
from tranship.dock.group import Group
from tranship.dock.leases import Lease
from tranship.dock.messages import Answer, BlockRef, GroupEntry, Kind, StageNeeds, Take


def ask_home(
    home: Callable[..., Any], needs: StageNeeds, reader: str, kinds: Sequence[Kind], count: int, **more: Any
) -> Answer:
    """A take at the dock for a stage: up to `count` groups or rows. more: as DockLink.call takes it."""
    method, limit = ("take", "max_groups") if needs.unit == "group" else ("take_rows", "max_rows")
    return home("ask", method, needs.name, reader, kinds=tuple(kinds), **{limit: count}, **more)


@dataclass(eq=False)
class Loan:
    """A lease of the dock. left: keys of it that are not done. done: groups that are, and of which the dock does not
    know it yet. lost: groups that the dock took away."""

    id: int
    version: int
    entries: dict[int, GroupEntry]
    left: dict[Key, None] = field(default_factory=dict)
    done: list[int] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)


@dataclass(eq=False)
class _Held:
    """A group of which keys are here, ready or with readers, and under which loan each of them is."""

    group: Group
    keys: dict[Key, Loan] = field(default_factory=dict)


class Loans:
    """Keys on loan from the dock, in the order that they came in; those that come back from a reader go first.

    home(method, ...): runs a method of the dock, at once.
    """

    def __init__(self, needs: StageNeeds, home: Callable[..., Any]) -> None:
        self._needs = needs
        self._home = home
        self._queues: dict[Kind, OrderedDict[Key, None]] = {"train": OrderedDict(), "val": OrderedDict()}
        self._held: dict[int, _Held] = {}
        self._lent: dict[Key, Lease] = {}
        self._loans: dict[int, Loan] = {}

    def keys_of(self, entry: GroupEntry) -> list[Key]:
        """What is taken of a group, as keys of the stage."""
        if self._needs.unit == "group":
            return [entry.group_id]
        return [(entry.group_id, index) for index in entry.samples]

    def num_ready(self, kind: Kind) -> int:
        """How many keys are ready."""
        return len(self._queues[kind])

    def ready(self, kind: Kind, limit: int) -> list[Key]:
        """The first ready keys, up to `limit`."""
        return list(islice(self._queues[kind], limit))

    def group_of(self, key: Key) -> Group:
        """The group of a key that is here."""
        return self._held[_group_id(key)].group

    def loans_of(self, keys: Iterable[Key]) -> dict[Loan, list[Key]]:
        """The loans that keys are under, and which are under which."""
        found: dict[Loan, list[Key]] = {}
        for key in keys:
            found.setdefault(self._held[_group_id(key)].keys[key], []).append(key)
        return found

    # Keys come, go to readers, and come back

    def receive(self, take: Take) -> None:
        """The dock has lent more. Keys that are here already were taken away before, and come anew."""
        loan = Loan(take.lease, take.version, {entry.group_id: entry for entry in take.groups})
        self._loans[loan.id] = loan
        for entry in take.groups:
            keys = self.keys_of(entry)
            known = self._held.get(entry.group_id)
            if known is not None:
                for old in dict.fromkeys(known.keys[key] for key in keys if key in known.keys):
                    self._revoke(entry.group_id, old)
            held = self._held.get(entry.group_id)
            if held is None:
                held = _Held(Group(entry.group_id, entry.size, entry.kind, entry.attempt))
                self._held[entry.group_id] = held
            queue = self._queues[entry.kind]
            for key in keys:
                held.keys[key] = loan
                loan.left[key] = queue[key] = None

    def lend(self, keys: Iterable[Key], lease: Lease) -> None:
        """Ready keys are with a reader now."""
        for key in keys:
            del self._queues[self.group_of(key).kind][key]
            self._lent[key] = lease

    def put_back(self, keys: Iterable[Key]) -> None:
        """A reader did not finish these keys: they go to the front, in their order."""
        for key in reversed(list(keys)):
            del self._lent[key]
            queue = self._queues[self.group_of(key).kind]
            queue[key] = None
            queue.move_to_end(key, last=False)

    def finish(self, keys: Sequence[Key]) -> None:
        """A reader is done with keys. The dock is told at once of loans that are done, of other groups by `keep`."""
        for loan, done in self.loans_of(keys).items():
            for key in done:
                del self._lent[key], loan.left[key]
                group_id = _group_id(key)
                held = self._held[group_id]
                del held.keys[key]
                if not any(other is loan for other in held.keys.values()):
                    loan.done.append(group_id)
                if not held.keys:
                    del self._held[group_id]
            self._settle(loan)

    def entries(self, keys: Sequence[Key]) -> tuple[GroupEntry, ...]:
        """What a reader of keys needs to find their columns."""
        samples: dict[int, list[int]] = {}
        for key in keys:
            samples.setdefault(_group_id(key), []).append(0 if isinstance(key, int) else key[1])
        if self._needs.unit == "group":
            return tuple(self._held[group_id].keys[group_id].entries[group_id] for group_id in samples)
        return tuple(self._entry_of(group_id, indices) for group_id, indices in samples.items())

    def _entry_of(self, group_id: int, indices: list[int]) -> GroupEntry:
        """The entry of some samples of a group, which may have come under several loans."""
        held = self._held[group_id]
        found = [held.keys[group_id, index].entries[group_id] for index in indices]
        first = found[0]
        if found.count(first) == len(found) and tuple(indices) == first.samples:
            return first
        refs: dict[str, BlockRef | tuple[BlockRef, ...]] = {}
        for column in first.refs:
            each = tuple(_ref(entry, column, index) for entry, index in zip(found, indices, strict=True))
            refs[column] = each[0] if each.count(each[0]) == len(each) else each
        return first._replace(samples=tuple(indices), refs=refs)

    # What the dock says of its loans

    def leave(self, group_id: int, by: Lease) -> None:
        """A group has left the dock, at the word of a reader; other readers learn that they have lost it."""
        held = self._held.pop(group_id)
        for key, loan in held.keys.items():
            del loan.left[key]
            loan.lost.add(group_id)
            lease = self._lent.pop(key, None)
            if lease is None:
                del self._queues[held.group.kind][key]
            else:
                del lease.keys[key]
                if lease is not by and group_id not in lease.revoked:
                    lease.revoked.append(group_id)
        for loan in dict.fromkeys(held.keys.values()):
            self._settle(loan)

    def refresh(self, loans: Iterable[Loan]) -> bool:
        """Ask the dock what it has taken away, and take it from the readers. Returns whether it is anything new."""
        is_new = False
        for loan in loans:
            if loan.id not in self._loans:
                continue
            try:
                lost = set(self._home("renew", loan.id)) - loan.lost
            except StaleLease:
                lost = {_group_id(key) for key in loan.left}
                del self._loans[loan.id]
            for group_id in lost:
                loan.lost.add(group_id)
                is_new |= self._revoke(group_id, loan)
            if loan.id in self._loans:
                self._settle(loan)
        return is_new

    def keep(self) -> bool:
        """Renew every loan, and tell the dock what is done; returns whether something was taken away.

        One message if nothing was, and one for each loan of which something is done or lost.
        """
        unsure: list[Loan] = []
        whole: list[Loan] = []
        for loan in self._loans.values():
            if loan.done:
                try:
                    self._home("ack", loan.id, loan.done)
                except StaleLease:
                    unsure.append(loan)
                    continue
                finally:
                    loan.done = []
            (unsure if loan.lost else whole).append(loan)
        if whole:
            try:
                self._home("check", [loan.id for loan in whole])
            except StaleLease:
                unsure += whole
        return self.refresh(dict.fromkeys(unsure))

    def _settle(self, loan: Loan) -> None:
        """Tell the dock of a loan of which nothing is left."""
        if loan.left:
            return
        del self._loans[loan.id]
        try:
            self._home("ack", loan.id)
        except StaleLease:
            pass  # The dock has closed it already: all of it had been dropped, or was taken away.

    def _revoke(self, group_id: int, loan: Loan) -> bool:
        """A group of a loan was taken away: no reader has it any more. Returns whether anything of it was here."""
        held = self._held.get(group_id)
        keys = [] if held is None else [key for key, under in held.keys.items() if under is loan]
        if held is None or not keys:
            return False
        losers: dict[int, Lease] = {}
        for key in keys:
            del held.keys[key], loan.left[key]
            lease = self._lent.pop(key, None)
            if lease is None:
                del self._queues[held.group.kind][key]
            else:
                del lease.keys[key]
                losers[lease.id] = lease
        for lease in losers.values():
            # Rows of the group that are under another loan are still good, and this reader will pass over the group.
            rest = [key for key, group in lease.keys.items() if group.group_id == group_id]
            self.put_back(rest)
            for key in rest:
                del lease.keys[key]
            lease.revoked.append(group_id)
        if not held.keys:
            del self._held[group_id]
        return True


def _ref(entry: GroupEntry, column: str, index: int) -> BlockRef:
    where = entry.refs[column]
    return where if isinstance(where, BlockRef) else where[entry.samples.index(index)]


def _group_id(key: Key) -> int:
    return key if isinstance(key, int) else key[0]
