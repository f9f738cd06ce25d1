"""The dock of one process: who has which rows, what may be trained on, and what became of everything.

Synchronous and not thread-safe: whoever hosts it calls one method after the other. It moves no payload and knows no
stage by name. Delivery is at least once (a lease that is silent for too long goes to another reader), counting is
exactly once: a message under a lease that is over is refused (StaleLease), and columns that a row already has are kept.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from tranship.dock.bound import Bound
from tranship.dock.controller import Controller, Key
from tranship.dock.errors import StaleLease
from tranship.dock.group import OWN, Group
from tranship.dock.leases import Lease, LeaseTable
from tranship.dock.ledger import TOO_STALE, Ledger
from tranship.dock.messages import (
    Admission,
    Answer,
    ExpiredLease,
    Kind,
    MemoryUse,
    Publish,
    SlabLease,
    StageNeeds,
    Status,
    Take,
    Unit,
)
from tranship.dock.table import GroupTable, Ready
from tranship.dock.warehouse import Warehouse
from tranship.dock.window import Unfinished, Window
from tranship.types import SampleId, UserError

_EXPIRED_KEPT = 1000


class Dock:
    """The metadata plane of one process, and the owner of the payload's slabs.

    stages: what each stage reads. batch_groups: groups of one batch. staleness: the bound K on (version at use) -
    (oldest version of any token). on_stale: what happens to a group that would pass it: `finish_first` holds the next
    batch back until the group is done, `discard` drops it as too_stale. ordered: the batch of version v is the groups
    [v * batch_groups, (v + 1) * batch_groups), which the bound allows by admission alone
    (always so at K = 0).
    lease_s: how long a reader may be silent. slab_bytes, capacity_bytes, shared, root: see Warehouse. clock: seconds.

    seq goes up with every change that could unblock someone. version is that of the batch that is trained on next.
    """

    def __init__(
        self,
        stages: Sequence[StageNeeds],
        *,
        run_id: str,
        batch_groups: int,
        staleness: int,
        on_stale: Literal["finish_first", "discard"] = "finish_first",
        lease_s: float,
        slab_bytes: int,
        capacity_bytes: int,
        shared: bool,
        ordered: bool,
        clock: Callable[[], float] = time.monotonic,
        root: Path | None = None,
    ) -> None:
        if batch_groups < 1 or staleness < 0 or lease_s <= 0:
            raise ValueError(f"batch_groups {batch_groups}, staleness {staleness}, lease_s {lease_s}: out of range")
        self.ledger = Ledger()
        self.seq = 0
        self._warehouse = Warehouse(run_id, slab_bytes, capacity_bytes, shared, root=root)
        self._table = GroupTable(stages, self._warehouse)
        self._leases = LeaseTable(lease_s)
        self._window = Window(batch_groups, staleness, ordered or staleness == 0)
        self._bound = Bound(self._window)
        self._discards = on_stale == "discard"
        self._batch_stage: str | None = None
        self._clock = clock
        self._expired: deque[ExpiredLease] = deque(maxlen=_EXPIRED_KEPT)
        self._attempts: dict[int, int] = {}
        self._refused = False

    @property
    def version(self) -> int:
        """The policy version that the next batch trains."""
        return self._window.version

    def status(self) -> Status:
        """seq, version and num_admissible in one message."""
        self._expire()
        return Status(self.seq, self.version, self.num_admissible())

    def num_admissible(self) -> int:
        """How many training groups may be admitted now: (staleness + 1) * batch_groups less those not consumed yet."""
        return self._window.num_admissible

    # Rows come in

    def admit(self, groups: Sequence[Admission]) -> None:
        """New groups. ValueError, and nothing changes, if an id is in use, or admission would pass num_admissible."""
        self._expire()
        self._check_admission(groups)
        for admission in groups:
            attempt = admission.attempt
            if attempt is None:
                attempt = self._attempts.pop(admission.group_id, 0)
            group = Group(admission.group_id, admission.size, admission.kind, attempt)
            if group.kind == "train":
                self.ledger.admit(group.group_id)
                self._window.num_unconsumed += 1
            else:
                self.ledger.val_admitted += 1
            ready = self._table.admit(group)
            ready += self._table.store(group, group.sample(OWN), admission.columns, admission.block)
            self._resolve(ready)
        self._changed()

    def publish(self, publish: Publish) -> None:
        """Columns of some rows are there. Of a row that has a column already, the first one stays.

        Raises, and changes nothing: StaleLease if the lease is over or does not cover the rows, StaleSlab if the slab
        was taken from its owner, ValueError for rows that do not exist or a version that the bound does not allow.
        """
        self._expire()
        lease = None if publish.lease is None else self._lease(publish.lease)
        rows = [(row, self._row_group(row, lease)) for row in publish.rows]
        self._warehouse.check_block(publish.block, publish.owner)
        new = [(row, group, self._table.missing(row, group, publish.columns)) for row, group in rows]
        new = [(row, group, columns) for row, group, columns in new if columns]
        sampled = {group.group_id: (group, self._bound.sampled_version(group, publish)) for _, group, _ in new}
        for group, version in sampled.values():
            if version is not None and not self._bound.may_declare(group, version):
                raise ValueError(f"group {group.group_id} may not hold tokens of version {version}: {self._bound}")
        for group, version in sampled.values():
            if version is not None:
                published = version if group.published is None else min(group.published, version)
                self._bound.set_versions(group, group.declared, published)
        ready: list[Ready] = []
        for row, group, columns in new:
            ready += self._table.store(group, row, columns, publish.block)
        self._resolve(ready)
        self._changed()

    # Rows go out

    def take(
        self,
        stage: str,
        reader: str,
        *,
        max_groups: int,
        version: int | None = None,
        kinds: Sequence[Kind] = ("train",),
    ) -> Take | None:
        """Up to max_groups whole groups that a stage can work on, kinds in the given order; None if there are none.

        version: the sampler's policy version. Training groups are then handed out only as far as they can be trained
        on within the bound, and count as started at that version.
        """
        self._expire()
        controller = self._controller(stage, "group")
        if stage == self._batch_stage and "train" in kinds:
            raise ValueError(f"stage {stage!r} takes batches: use take_batch")
        self._bound.check_sampler_version(version)
        picked: list[Key] = []
        self._refused = False
        for kind in kinds:
            gate = self._starter(version) if kind == "train" and version is not None else _always
            keys, refused = controller.pick(kind, max_groups - len(picked), gate)
            picked += keys
            self._refused = self._refused or refused
        if not picked:
            return None
        lease = self._lend(controller, reader, picked)
        groups = list(lease.groups.values())
        if version is not None:
            for group in groups:
                group.start_lease = lease.id if group.kind == "train" else None
        return self._take(lease, groups, controller)

    def take_rows(
        self, stage: str, reader: str, *, max_rows: int, kinds: Sequence[Kind] = ("train", "val")
    ) -> Take | None:
        """Up to max_rows rows that a stage can work on, of any groups; None if there are none."""
        self._expire()
        controller = self._controller(stage, "row")
        picked: list[Key] = []
        self._refused = False
        for kind in kinds:
            picked += controller.pick(kind, max_rows - len(picked), _always)[0]
        if not picked:
            return None
        lease = self._lend(controller, reader, picked)
        return self._take(lease, list(lease.groups.values()), controller)

    def take_batch(self, stage: str, reader: str, *, groups: int) -> Take | None:
        """The batch of this version: its groups that have rows, and how many were dropped; None if it has to wait.

        groups: batch_groups. The first call makes `stage` the one that takes batches. A batch ends by `trained`.
        RunError if a row is older than the bound, which only a bug can cause.
        """
        self._expire()
        if groups != self._window.batch:
            raise ValueError(f"a batch of {groups} groups was asked for, and batch_groups is {self._window.batch}")
        controller = self._controller(stage, "group")
        self._bind_batch_stage(stage, controller)
        self._refused = False
        chosen = self._window.choose()
        if chosen is None:
            return None
        victims: list[Unfinished] = []
        if not self._window.is_safe(chosen):
            if not self._discards:
                return None
            victims = self._window.victims(chosen, self._bound.unfinished(self._table.groups()))
        dropped = self._window.take(chosen)
        self._discard(victims)
        keys: list[Key] = [group_id for group_id in chosen if group_id in self._table]
        lease = self._lend(controller, reader, keys)
        lease.window, lease.dropped = tuple(chosen), dropped
        for group in lease.groups.values():
            group.in_batch = True
            self._bound.check_age(group)
        return self._take(lease, list(lease.groups.values()), controller)

    # What readers say about a lease

    def ack(self, lease: int, group_ids: Sequence[int] | None = None) -> None:
        """The reader is done with the rows of a lease (or with those of some groups) at its stage. StaleLease if gone.

        Of a batch this is said by `trained`.
        """
        self._expire()
        entry = self._lease(lease)
        if entry.window is not None:
            raise ValueError(f"lease {lease} is a batch: it ends by trained or release")
        for key, group in list(entry.keys.items()):
            if group_ids is None or group.group_id in group_ids:
                self._table.controllers[entry.stage].done(key)
                del entry.keys[key]
        if not entry.keys:
            self._close(entry)
        self._changed()

    def release(self, lease: int) -> None:
        """The rows of a lease go back, to be taken again, before others. StaleLease if it is gone."""
        self._expire()
        self._put_back(self._lease(lease))
        self._changed()

    def renew(self, lease: int) -> tuple[int, ...]:
        """The lease lasts for its full time from now on; returns ids of groups that were taken away from it.

        StaleLease if it is gone, or if nothing of it is left.
        """
        self._expire()
        return tuple(self._lease(lease).revoked)

    def check(self, leases: Sequence[int]) -> None:
        """StaleLease unless all of these leases hold, with all of their groups: the fence before an optimizer step."""
        self._expire()
        for lease in leases:
            revoked = self._lease(lease).revoked
            if revoked:
                raise StaleLease(f"lease {lease} has lost the groups {revoked}")

    def started(self, lease: int, group_id: int, version: int) -> None:
        """A taken group's oldest token will be of this policy version. ValueError if the bound does not allow it."""
        self._expire()
        entry = self._lease(lease)
        group = entry.groups.get(group_id)
        if group is None:
            raise StaleLease(f"lease {lease} does not cover group {group_id}")
        self._bound.check_sampler_version(version)
        if not self._bound.may_declare(group, version, instead=True):
            raise ValueError(f"group {group_id} may not start at version {version}: {self._bound}")
        group.start_lease = lease
        self._bound.set_versions(group, version, group.published)
        self._changed()

    def drop(self, group_ids: Sequence[int], reason: str, lease: int | None) -> None:
        """Groups leave for a reason ("filtered", "invalid:<why>", ...). Their places in a batch stay, empty.

        lease: under which they were taken (None: the coordinator's decision); it ends when nothing of it is left.
        StaleLease, and nothing changes, if it does not cover them, or if they are not here.
        """
        self._expire()
        by = None if lease is None else self._lease(lease)
        groups = []
        for group_id in dict.fromkeys(group_ids):
            group = self._table.get(group_id) if by is None else by.groups.get(group_id)
            if group is None:
                raise StaleLease(f"group {group_id} cannot be dropped: it has left, or lease {lease} does not cover it")
            if group.in_batch and (by is None or by.window is None):
                raise StaleLease(f"group {group_id} cannot be dropped: it is being trained on")
            groups.append(group)
        for group in groups:
            self._drop(group, reason, by)
        if by is not None and by.window is None and not by.keys:
            self._close(by)
        self._changed()

    def trained(self, lease: int) -> list[int]:
        """A batch has been trained on: its groups leave. Returns their ids. StaleLease at a second call."""
        self._expire()
        entry = self._lease(lease)
        if entry.window is None:
            raise ValueError(f"lease {lease} is not a batch: it ends by ack or release")
        groups = list(entry.groups.values())
        for group in groups:
            self.ledger.train(group.group_id)
            self._leave(group, entry)
        self._window.consume(entry.dropped)
        self._close(entry)
        self._changed()
        return [group.group_id for group in groups]

    def finish_val(self, group_ids: Sequence[int]) -> None:
        """Validation groups leave. Those that have left already are passed over."""
        self._expire()
        for group_id in group_ids:
            group = self._table.get(group_id)
            if group is None:
                continue
            if group.kind != "val":
                raise ValueError(f"group {group_id} is a training group: it ends by trained or drop")
            self.ledger.val_ended += 1
            self._leave(group, None)
        self._changed()

    # The run's clockwork

    def advance(self, version: int) -> None:
        """The next version begins; the batch of the last one must have been trained on."""
        self._expire()
        assert version == self.version + 1, f"version {self.version} cannot be followed by {version}"
        self._window.advance()
        self.ledger.check()
        assert self.ledger.in_flight + self.ledger.val_admitted - self.ledger.val_ended == len(self._table)
        self._changed()

    def expire(self) -> list[ExpiredLease]:
        """End the leases whose time is over; returns those that have ended so since the last call."""
        self._expire()
        expired = list(self._expired)
        self._expired.clear()
        return expired

    def retire(self, reader: str) -> None:
        """A reader is gone: its leases go back, and its slab is sealed after what it published."""
        self._expire()
        for lease in self._leases.of_reader(reader):
            self._put_back(lease)
        self._warehouse.seal(reader)
        self._changed()

    def ask(self, method: str, *args: Any, **kwargs: Any) -> Answer:
        """The answer of `take`, `take_rows` or `take_batch`, with the `seq` at which it was given."""
        assert method in ("take", "take_rows", "take_batch"), method
        take = getattr(self, method)(*args, **kwargs)
        return Answer(take, self.seq, self._refused)

    def snapshot(self) -> dict[str, Any]:
        """What a later dock needs to go on: the version to train next, the ledger, the training groups in flight."""
        groups = sorted((group.group_id, group.attempt) for group in self._table.groups() if group.kind == "train")
        return {
            "version": self._window.newest_version,
            "ledger": self.ledger.snapshot(),
            "in_flight": [list(group) for group in groups],
            "tombstones": [list(entry) for entry in sorted(self._window.tombstones.items())],
        }

    def restore(self, snapshot: dict[str, Any]) -> list[int]:
        """Go on from a snapshot, before anything is admitted. Returns the ids to admit again, in order."""
        assert not len(self._table), "a dock in use cannot be restored"
        version, tombstones = snapshot["version"], [(entry[0], entry[1]) for entry in snapshot["tombstones"]]
        self.ledger.restore(snapshot["ledger"])
        self._attempts = dict(snapshot["in_flight"])
        again = sorted(self._attempts)
        if self._window.ordered:
            self._check_order(version, {group_id for group_id, _ in tombstones}, again)
        self._window.restore(version, tombstones)
        self._changed()
        return again

    def close(self) -> None:
        """Remove the payload. A second call does nothing."""
        self._warehouse.close()

    # Payload

    def lease_slab(self, owner: str, min_bytes: int, giving_up: int | None = None) -> SlabLease | None:
        """A slab to write into; see Warehouse."""
        self._expire()
        return self._warehouse.lease_slab(owner, min_bytes, giving_up)

    def payload_folder(self) -> str | None:
        """Where slabs can be mapped; None if they are memory of this process."""
        return self._warehouse.folder

    def map_slab(self, slab: int) -> memoryview:
        """The memory of a slab of this process; only for callers in it."""
        return self._warehouse.memory(slab)

    def memory_use(self) -> MemoryUse:
        """How full the payload's memory is."""
        return self._warehouse.use()

    # Inside

    def _changed(self) -> None:
        self.seq += 1

    def _expire(self) -> None:
        overdue = self._leases.overdue(self._clock())
        for lease in overdue:
            self._expired.append(ExpiredLease(lease.id, lease.stage, lease.reader, tuple(lease.groups)))
            self._put_back(lease)
        if overdue:
            self._changed()

    def _lease(self, lease: int) -> Lease:
        """A lease that holds, renewed."""
        entry = self._leases.get(lease)
        if entry.revoked and not entry.keys:
            revoked = entry.revoked
            self._close(entry)
            raise StaleLease(f"lease {lease} is over: its groups {revoked} have left the dock")
        self._leases.renew(entry, self._clock())
        return entry

    def _lend(self, controller: Controller, reader: str, keys: list[Key]) -> Lease:
        groups = {key: self._group_of(key) for key in keys}
        lease = self._leases.open(controller.needs.name, reader, groups, self._clock())
        controller.lend(keys, lease.id)
        return lease

    def _group_of(self, key: Key) -> Group:
        group = self._table.get(key if isinstance(key, int) else key[0])
        assert group is not None, key
        return group

    def _take(self, lease: Lease, groups: list[Group], controller: Controller) -> Take:
        reads = controller.needs.reads
        if controller.takes_groups:
            entries = tuple(group.entry(reads) for group in groups)
        else:
            rows: dict[int, list[int]] = {}
            for key in lease.keys:
                assert not isinstance(key, int), key
                rows.setdefault(key[0], []).append(key[1])
            entries = tuple(group.entry(reads, rows[group.group_id]) for group in groups)
        window = lease.window or ()
        return Take(lease.id, lease.stage, lease.deadline, self.version, entries, window, len(lease.dropped))

    def _put_back(self, lease: Lease) -> None:
        """The rows of a lease are ready again. What was started under it, and not published, counts as not started."""
        self._table.controllers[lease.stage].put_back(lease.keys)
        if lease.window is not None:
            groups = list(lease.groups.values())
            for group in groups:
                group.in_batch = False
            self._window.give_back([(group.group_id, self._bound.deadline(group)) for group in groups], lease.dropped)
        for group in lease.groups.values():
            if group.start_lease == lease.id:
                group.start_lease = None
                self._bound.set_versions(group, None, group.published)
        self._close(lease)

    def _close(self, lease: Lease) -> None:
        for group in self._leases.close(lease):
            self._table.free(group)

    def _leave(self, group: Group, by: Lease | None) -> None:
        """A group leaves the dock. Leases other than `by` learn that they have lost it."""
        for lease_id, keys in self._table.leave(group).items():
            lease = self._leases.get(lease_id)
            for key in keys:
                del lease.keys[key]
            if lease is not by:
                lease.revoked.append(group.group_id)
        if not group.pins:
            self._table.free(group)

    def _drop(self, group: Group, reason: str, by: Lease | None) -> None:
        deadline = self._bound.deadline(group)
        self._leave(group, by)
        if group.kind == "val":
            self.ledger.val_ended += 1
            return
        self.ledger.drop(group.group_id, reason)
        if by is not None and by.window is not None:
            self._window.bury_in_batch(group.group_id)
            by.dropped.append(group.group_id)
        else:
            self._window.bury(group.group_id, deadline)

    def _starter(self, version: int) -> Callable[[Key], bool]:
        """Starts a group at a sampler's version, if the bound allows it; says whether it did."""

        def start(key: Key) -> bool:
            group = self._group_of(key)
            if not self._bound.may_declare(group, version, instead=True):
                return False
            self._bound.set_versions(group, version, group.published)
            return True

        return start

    def _discard(self, victims: Sequence[Unfinished]) -> None:
        for victim in victims:
            self._window.move(victim.group_id, victim.deadline, None)
        for victim in victims:
            group = self._group_of(victim.group_id)
            group.declared = group.published = None
            self._drop(group, TOO_STALE, None)

    # Checks of what comes in

    def _controller(self, stage: str, unit: Unit) -> Controller:
        controller = self._table.controllers.get(stage)
        if controller is None:
            raise ValueError(f"no stage is called {stage!r}: there are {list(self._table.controllers)}")
        if controller.needs.unit != unit:
            raise ValueError(f"stage {stage!r} takes by {controller.needs.unit}, not by {unit}")
        return controller

    def _bind_batch_stage(self, stage: str, controller: Controller) -> None:
        if self._batch_stage is None:
            self._batch_stage = stage
            self._resolve([Ready(stage, self._group_of(key)) for key in controller.ready("train")])
        elif self._batch_stage != stage:
            raise ValueError(f"batches go to stage {self._batch_stage!r}, not to {stage!r}")

    def _resolve(self, ready: Iterable[Ready]) -> None:
        for event in ready:
            if event.stage == self._batch_stage and event.group.kind == "train":
                self._window.resolve(event.group.group_id, self._bound.deadline(event.group))

    def _row_group(self, row: SampleId, lease: Lease | None) -> Group:
        """The group of a row that a message may bring columns of."""
        group = self._table.get(row.group_id)
        if group is None:
            raise StaleLease(f"group {row.group_id} has left the dock")
        if row.attempt != group.attempt or not OWN <= row.sample_index < group.size:
            raise ValueError(
                f"{row} is not a row of group {row.group_id} ({group.size} samples, attempt {group.attempt})"
            )
        if lease is not None and row.group_id not in lease.keys and (row.group_id, row.sample_index) not in lease.keys:
            raise StaleLease(f"lease {lease.id} does not cover {row}")
        return group

    def _check_admission(self, groups: Sequence[Admission]) -> None:
        ids = [admission.group_id for admission in groups]
        num_train = sum(admission.kind == "train" for admission in groups)
        if num_train > self.num_admissible():
            raise ValueError(f"{num_train} groups were admitted, and {self.num_admissible()} may be")
        if len(set(ids)) != len(ids):
            raise ValueError(f"a group was admitted twice: {ids}")
        for admission in groups:
            group_id, kind = admission.group_id, admission.kind
            if kind not in ("train", "val") or admission.size < 1:
                raise ValueError(f"group {group_id} cannot be of kind {kind!r} with {admission.size} samples")
            if group_id in self._table or (kind == "train" and (group_id < 0 or self.ledger.has_ended(group_id))):
                raise ValueError(
                    f"group {group_id} cannot be admitted: {self.ledger.outcome(group_id) or 'its id is in use'}"
                )
            self._warehouse.check_block(admission.block)

    def _check_order(self, version: int, tombstones: set[int], again: Sequence[int]) -> None:
        """What has ended must be the batches so far, or the batches to come would wait for ever."""
        first = version * self._window.batch
        ended = set(self.ledger.ended_from(first)) - tombstones
        early = [group_id for group_id in (*again, *tombstones) if group_id < first]
        if ended or early:
            raise UserError(
                f"the snapshot of version {version} does not go on in order with {self._window.batch} groups a batch "
                f"(groups {sorted(ended or early)[:4]}): keep the batch size, the staleness "
                "and run.deterministic as they were"
            )


def _always(key: Key) -> bool:
    return True
