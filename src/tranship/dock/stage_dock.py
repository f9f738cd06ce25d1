"""A dock of one stage, outside the dock's process: rows taken from the dock in loads, lent to the stage's readers.

To the dock it is a reader; to the stage's readers it is the dock, with the same messages and errors. The dock stays
the one truth: columns and drops go on to it under the lease that it gave, and what it refuses is refused here. Under a
lease of here that is over nothing goes on. Nothing of it needs to outlive its process: the dock's leases go back then,
and a successor starts with nothing and takes again.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from tranship.dock.controller import Key
from tranship.dock.errors import StaleLease
from tranship.dock.group import OWN
from tranship.dock.leases import Lease, LeaseTable
from tranship.dock.loans import Loans, ask_home
from tranship.dock.messages import Answer, ExpiredLease, Kind, Publish, StageNeeds, Status, Take
from tranship.types import RunError, SampleId, UserError

_NUMBER_AT = 55
_MAX_NUMBER = 127
_EXPIRED_KEPT = 1000


def stage_number(stage: str, spread: Iterable[str]) -> int:
    """A stage's number among those whose controllers have processes of their own, from 1 on. UserError if it is none of
    them, or if they are too many."""
    names = sorted(spread)
    if stage not in names:
        raise UserError(f"stage {stage!r} is none of those with a controller of their own: {names}")
    if len(names) > _MAX_NUMBER:
        raise UserError(f"{len(names)} stages were to have controllers of their own, and at most {_MAX_NUMBER} can")
    return names.index(stage) + 1


def number_of(lease: int) -> int:
    """The number of the stage whose controller gave a lease; 0: the dock did."""
    return lease >> _NUMBER_AT


class StageDock:
    """The state of one stage's controller. Synchronous and not thread-safe, like Dock.

    home(method, ...): runs a method of the dock, at once. number: see stage_number. name: as a reader of the dock, its
    own in the run. lease_s: the dock's; `keep` has to be called well within it. prefetch: how many groups (or rows) are
    taken from the dock at once, if no reader asks for more. await_rows(kind, count): to have rows of a kind taken when
    the dock has some, and brought by `receive`; None: an empty take asks the dock each time.

    seq goes up with every change that could unblock a reader.
    """

    def __init__(
        self,
        needs: StageNeeds,
        home: Callable[..., Any],
        *,
        number: int,
        name: str,
        lease_s: float,
        prefetch: int,
        clock: Callable[[], float] = time.monotonic,
        await_rows: Callable[[Kind, int], None] | None = None,
    ) -> None:
        if prefetch < 1 or not 1 <= number <= _MAX_NUMBER:
            raise ValueError(f"prefetch {prefetch}, number {number}: out of range")
        self.seq = 0
        self._needs = needs
        self._home = home
        self._name = name
        self._lease_s = lease_s
        self._prefetch = prefetch
        self._clock = clock
        self._await_rows = await_rows
        self._loans = Loans(needs, home)
        self._leases = LeaseTable(lease_s)
        # Other ids than those of the dock, of other controllers, and of predecessors that readers still speak of.
        self._leases.next_id = (number << _NUMBER_AT) + (secrets.randbits(28) << 26) + 1
        self._awaited: set[Kind] = set()
        self._has_more: dict[Kind, bool] = {"train": False, "val": False}
        self._kept_at = clock()
        self._version = 0
        self._expired: deque[ExpiredLease] = deque(maxlen=_EXPIRED_KEPT)

    # Rows come from the dock

    def receive(self, kind: Kind, take: Take, count: int) -> None:
        """Rows that were awaited of a kind. count: how many had been asked for."""
        self._awaited.discard(kind)
        self._take_in(take, (kind,), count)

    def _take_in(self, take: Take, kinds: Sequence[Kind], count: int) -> None:
        self._loans.receive(take)
        self._version = max(self._version, take.version)
        is_full = sum(len(self._loans.keys_of(entry)) for entry in take.groups) >= count
        self._has_more.update(dict.fromkeys(kinds, is_full))
        self.seq += 1

    def _fetch(self, kinds: Sequence[Kind], count: int, waiting: bool) -> bool:
        """Ask the dock, which may have rows: for now, or for when it has some. Returns whether any have come."""
        unasked = [kind for kind in kinds if kind not in self._awaited]
        limit = max(count, self._prefetch)
        if unasked and not (waiting and self._await_rows is not None):
            answer = ask_home(self._home, self._needs, self._name, unasked, limit)
            if answer.take is not None:
                self._take_in(answer.take, unasked, limit)
                return True
        for kind in unasked:
            self._order(kind, limit)
        return False

    def _order(self, kind: Kind, count: int) -> None:
        if self._await_rows is not None and kind not in self._awaited:
            self._awaited.add(kind)
            self._await_rows(kind, count)

    # Rows go out

    def ask(
        self,
        method: str,
        stage: str,
        reader: str,
        *,
        max_groups: int = 1,
        max_rows: int = 1,
        groups: int = 1,
        version: int | None = None,
        kinds: Sequence[Kind] = ("train",),
        done: Sequence[int] = (),
        waiting: bool = False,
    ) -> Answer:
        """The answer of `take` or `take_rows` (see Dock.ask). waiting: an answer without rows will be asked for again.

        UserError for a batch, or with a sampler's version: only the dock knows the bound.
        """
        self._begin()
        by_rows = self._needs.unit == "row"
        if method == "take_batch" or version is not None:
            what = "takes batches" if method == "take_batch" else "samples, at a policy version"
            raise UserError(
                f"stage {stage!r} {what}: the dock has to hold it to the staleness bound, so that it cannot have a "
                "controller in a process of its own"
            )
        if stage != self._needs.name or (method == "take_rows") != by_rows:
            raise ValueError(f"stage {stage!r} does not take by {method!r} here: {self._needs}")
        limit = max_rows if by_rows else max_groups
        if limit < 1:
            raise ValueError(f"{limit} groups or rows were asked for")
        for lease in done:
            self._lease(lease)
        for lease in done:
            self.ack(lease)
        picked = self._pick(kinds, limit)
        if not picked and self._fetch(kinds, limit, waiting):
            picked = self._pick(kinds, limit)
        if not picked:
            return Answer(None, self.seq)
        entries = self._loans.entries(picked)
        keys = {key: self._loans.group_of(key) for key in picked}
        lease = self._leases.open(stage, reader, keys, self._clock())
        self._loans.lend(picked, lease)
        for kind in kinds:
            if self._has_more[kind] and self._loans.num_ready(kind) < limit:
                self._order(kind, max(limit, self._prefetch))
        return Answer(Take(lease.id, stage, lease.deadline, self._version, entries), self.seq)

    def _pick(self, kinds: Sequence[Kind], limit: int) -> list[Key]:
        picked: list[Key] = []
        for kind in kinds:
            picked += self._loans.ready(kind, limit - len(picked))
        return picked

    # What readers say about a lease

    def publish(self, publish: Publish) -> None:
        """Columns of some rows are there (see Dock.publish): told to the dock, once for each of its leases."""
        self._begin(publish.lease)
        if publish.lease is None:
            self._home("publish", publish)
            return
        entry = self._lease(publish.lease)
        rows: dict[int, list[SampleId]] = {}
        loans = {loan.id: loan for loan in self._loans.loans_of(entry.keys)}
        under = {key: loan.id for loan, keys in self._loans.loans_of(entry.keys).items() for key in keys}
        for row in publish.rows:
            if row.group_id not in entry.revoked:
                rows.setdefault(self._covering(row, entry, under), []).append(row)
        if publish.rows and not rows:
            raise StaleLease(f"the groups of {publish.rows[:4]} were taken away from lease {entry.id}")
        refused: StaleLease | None = None
        accepted = False
        for loan, part in rows.items():
            try:
                self._home("publish", replace(publish, rows=part, lease=loan))
            except StaleLease as error:
                refused = error
                self._refresh([loans[loan]])
            except ValueError as error:
                if accepted:
                    raise RunError(f"the dock took a part of a block only: {error}") from error
                raise
            else:
                accepted = True
        if refused is not None and not accepted:
            raise refused

    def _covering(self, row: SampleId, entry: Lease, under: dict[Key, int]) -> int:
        """The dock's lease for a row. StaleLease if the reader's does not cover it, ValueError if it is none."""
        loan = under.get(row.group_id)
        if loan is None:
            loan = under.get((row.group_id, row.sample_index))
        if loan is None:
            raise StaleLease(f"lease {entry.id} does not cover {row}")
        group = self._loans.group_of(row.group_id)
        if row.attempt != group.attempt or not OWN <= row.sample_index < group.size:
            raise ValueError(f"{row} is no row of group {row.group_id}")
        return loan

    def ack(self, lease: int, group_ids: Sequence[int] | None = None) -> None:
        """Done with the rows of a lease, or with those of some groups (see Dock.ack)."""
        self._begin(lease)
        entry = self._lease(lease)
        done = [key for key, group in entry.keys.items() if group_ids is None or group.group_id in group_ids]
        for key in done:
            del entry.keys[key]
        if not entry.keys:
            self._leases.close(entry)
        self._loans.finish(done)

    def release(self, lease: int) -> None:
        """The rows of a lease are ready again, before others. StaleLease if it is gone."""
        self._begin(lease)
        self._put_back(self._lease(lease))

    def renew(self, lease: int) -> tuple[int, ...]:
        """The lease lasts for its full time from now on; returns ids of groups that were taken away, as the dock knows
        it now. StaleLease if nothing of it is left."""
        self._begin(lease)
        self._refresh(self._loans.loans_of(self._lease(lease).keys))
        return tuple(self._lease(lease).revoked)

    def check(self, leases: Sequence[int]) -> None:
        """StaleLease unless all of these leases hold, with all of their groups, as the dock knows it now."""
        self._begin(*leases)
        entries = [self._lease(lease) for lease in leases]
        self._refresh(self._loans.loans_of(key for entry in entries for key in entry.keys))
        for lease in leases:
            revoked = self._lease(lease).revoked
            if revoked:
                raise StaleLease(f"lease {lease} has lost the groups {revoked}")

    def drop(self, group_ids: Sequence[int], reason: str, lease: int | None) -> None:
        """Groups leave the dock for a reason (see Dock.drop)."""
        self._begin(lease)
        if lease is None:
            self._home("drop", list(group_ids), reason, None)
            return
        entry = self._lease(lease)
        kept = [group_id for group_id in dict.fromkeys(group_ids) if group_id not in entry.revoked]
        if group_ids and not kept:
            raise StaleLease(f"the groups {list(group_ids)[:4]} were taken away from lease {lease}")
        keys = {group.group_id: key for key, group in entry.keys.items()}
        for group_id in kept:
            if group_id not in keys:
                raise StaleLease(f"group {group_id} cannot be dropped: lease {lease} does not cover it")
        refused: StaleLease | None = None
        accepted = False
        for loan, of_loan in self._loans.loans_of(keys[group_id] for group_id in kept).items():
            groups = dict.fromkeys(key if isinstance(key, int) else key[0] for key in of_loan)
            ids = [group_id for group_id in groups if group_id not in entry.revoked]
            if not ids:
                continue
            try:
                self._home("drop", ids, reason, loan.id)
            except StaleLease as error:
                refused = error
                self._refresh([loan])
            else:
                accepted = True
                for group_id in ids:
                    self._loans.leave(group_id, entry)
        if refused is not None and not accepted:
            raise refused
        if not entry.keys:
            self._leases.close(entry)

    def started(self, lease: int, group_id: int, version: int) -> None:
        """UserError: a stage that samples has its controller in the dock."""
        raise UserError(
            f"stage {self._needs.name!r} says that group {group_id} is sampled at version {version}: the dock has to "
            "hold it to the staleness bound, so that it cannot have a controller in a process of its own"
        )

    def trained(self, lease: int) -> list[int]:
        """ValueError: there are no batches here; StaleLease if the lease is over."""
        self._begin(lease)
        raise ValueError(f"lease {self._lease(lease).id} is not a batch: it ends by ack or release")

    # The controller's own

    def status(self) -> Status:
        """The dock's numbers, and the seq of here."""
        return self._home("status")._replace(seq=self.seq)

    def changed(self, since: int) -> int | None:
        """The current seq if it is larger than `since`, else None."""
        self._begin()
        return self.seq if self.seq > since else None

    def expire(self) -> list[ExpiredLease]:
        """End the leases whose time is over; returns those that have ended so since the last call."""
        self._begin()
        expired = list(self._expired)
        self._expired.clear()
        return expired

    def retire(self, reader: str) -> None:
        """A reader is gone: its leases go back."""
        self._begin()
        for lease in self._leases.of_reader(reader):
            self._put_back(lease)

    def next_deadline(self) -> float | None:
        """When the next lease is over if nobody speaks; None if there is no lease."""
        return self._leases.next_deadline()

    def keep(self) -> None:
        """Renew the dock's leases, tell it what is done, and learn what it took away."""
        self._kept_at = self._clock()
        if self._loans.keep():
            self.seq += 1

    def _begin(self, *speakers: int | None) -> None:
        """Before a message: the dock's leases may be over after a standstill, those of readers at any time."""
        now = self._clock()
        if now - self._kept_at >= self._lease_s:
            self.keep()
        for lease in self._leases.overdue(now):
            if lease.id not in speakers:
                self._expired.append(ExpiredLease(lease.id, lease.stage, lease.reader, tuple(lease.groups)))
                self._put_back(lease)

    def _lease(self, lease: int) -> Lease:
        """A lease, renewed. StaleLease if it is over, or if nothing of it is left."""
        entry = self._leases.get(lease)
        if entry.revoked and not entry.keys:
            self._leases.close(entry)
            raise StaleLease(f"lease {lease} is over: its groups {entry.revoked} were taken away")
        self._leases.renew(entry, self._clock())
        return entry

    def _put_back(self, lease: Lease) -> None:
        self._loans.put_back(lease.keys)
        self._leases.close(lease)
        self.seq += 1

    def _refresh(self, loans: Iterable[Any]) -> None:
        if self._loans.refresh(loans):
            self.seq += 1
