"""The dock of one process: who has which rows, what may be trained on, and what became of everything.

Synchronous and not thread-safe: whoever hosts it calls one method after the other. It moves no payload and knows no
stage by name. Delivery is at least once (a lease that is silent for too long goes to another reader), counting is
exactly once: a message under a lease that is over is refused (StaleLease), and columns that a row already has are kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from tranship.dock.checks import (
    check_admissions,
    check_load,
    check_order,
    check_tokens,
    groups_to_drop,
    rows_to_publish,
)
from tranship.dock.controller import Key
from tranship.dock.errors import StaleLease
from tranship.dock.flow import Flow
from tranship.dock.group import Group
from tranship.dock.leases import LeaseTable
from tranship.dock.ledger import Ledger
from tranship.dock.messages import (
    HOME,
    Admission,
    Answer,
    Chore,
    ExpiredLease,
    Kind,
    Load,
    MemoryUse,
    NodePlace,
    Publish,
    SlabLease,
    StageNeeds,
    Status,
    Take,
)
from tranship.dock.table import GroupTable
from tranship.dock.warehouse import Warehouse
from tranship.dock.warehouses import Warehouses
from tranship.dock.window import Unfinished, Window


class Dock:
    """The metadata plane of one process, and the owner of the payload's slabs.

    stages: what each stage reads, and its policy of a take. batch_groups: groups of one batch. staleness: the bound K
    on (version at use) - (oldest version of any token). on_stale: what happens to a group that would pass it:
    `finish_first` holds the next batch back until the group is done, `discard` drops it as too_stale. ordered: the
    batch of version v is the groups [v * batch_groups, (v + 1) * batch_groups), which the bound then allows without any
    group being waited for or discarded (always so at K = 0). refill: a dropped group gives its place in a batch up, and
    another one may be admitted for it; an ordered batch is then the first batch_groups ids that were not dropped.
    lease_s: how long a reader may be silent (its lease ends when a message of anybody else finds it overdue).
    slab_bytes, capacity_bytes, shared, root, adopt, prefault: see Warehouse. clock: seconds.

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
        refill: bool = False,
        clock: Callable[[], float] = time.monotonic,
        root: Path | None = None,
        adopt: Path | None = None,
        prefault: int = 0,
    ) -> None:
        if batch_groups < 1 or staleness < 0 or lease_s <= 0:
            raise ValueError(f"batch_groups {batch_groups}, staleness {staleness}, lease_s {lease_s}: out of range")
        self.seq = 0
        home = Warehouse(run_id, slab_bytes, capacity_bytes, shared, root=root, adopt=adopt, prefault=prefault)
        self.warehouse = Warehouses(home, slab_bytes, capacity_bytes, lease_s)
        self._clock = clock
        # Else whoever journals the dock's messages tells it (lose_node).
        self.loses_nodes_by_clock = True
        self._flow = Flow(
            GroupTable(stages, self.warehouse),
            LeaseTable(lease_s),
            Window(batch_groups, staleness, ordered or staleness == 0, refill),
            clock,
        )
        self._discards = on_stale == "discard"
        self._attempts: dict[int, int] = {}
        self._refused = False

    @property
    def ledger(self) -> Ledger:
        """What became of each group."""
        return self._flow.ledger

    @property
    def version(self) -> int:
        """The policy version that the next batch trains."""
        return self._flow.window.version

    def status(self) -> Status:
        """A few numbers in one message."""
        self._expire()
        window = self._flow.window
        return Status(self.seq, self.version, window.num_admissible, window.newest_version, window.num_unconsumed)

    def changed(self, since: int) -> int | None:
        """The current seq if it is larger than `since`, else None: what a service can let a watcher wait for."""
        return self.seq if self.seq > since else None

    def num_admissible(self) -> int:
        """How many training groups may be admitted now: (staleness + 1) * batch_groups less those not consumed yet."""
        return self._flow.window.num_admissible

    # Rows come in

    def admit(self, groups: Sequence[Admission]) -> None:
        """New groups. ValueError, and nothing changes, if an id is in use, or admission would pass num_admissible."""
        self._expire()
        check_admissions(groups, self._flow.table, self.ledger, self.num_admissible())
        for admission in groups:
            self.warehouse.check_block(admission.block)
        for admission in groups:
            remembered = self._attempts.pop(admission.group_id, 0)
            self._flow.admit(admission, remembered if admission.attempt is None else admission.attempt)
        self._changed()

    def publish(self, publish: Publish) -> None:
        """Columns of some rows are there. Of a row that has a column already, the first one stays. Rows of groups
        that were taken away from the lease are passed over, if there are others.

        Raises, and changes nothing: StaleLease if the lease is over or does not cover the rows, StaleSlab if the slab
        was taken from its owner, ValueError for rows that do not exist or a version that the bound does not allow.
        """
        self._expire(publish.lease)
        lease = None if publish.lease is None else self._flow.lease(publish.lease)
        table = self._flow.table
        check_tokens(publish)
        whole, rows = rows_to_publish(publish.rows, publish.columns, lease, table)
        self.warehouse.check_block(publish.block, publish.owner)
        new = [(row, group, table.missing(row, group, publish.columns)) for row, group in rows]
        new = [(row, group, columns) for row, group, columns in new if columns]
        if publish.sampled_version is not None or lease is not None:
            self._declare(dict.fromkeys([*whole, *(group for _, group, _ in new)]), publish)
        if publish.tokens is not None:
            self._count(dict.fromkeys([*whole, *(group for _, group, _ in new)]), publish)
        ready = table.store_whole(whole, publish.columns, publish.block) if whole else []
        for row, group, columns in new:
            ready += table.store(group, row, columns, publish.block)
        self._flow.resolve(ready)
        self._changed()

    def _declare(self, groups: Iterable[Group], publish: Publish) -> None:
        """The groups hold tokens of the version that a message says. ValueError, before any change, if they may not."""
        sampled = [(group, self._flow.bound.sampled_version(group, publish)) for group in groups]
        for group, version in sampled:
            if version is not None and not self._flow.bound.may_declare(group, version):
                raise ValueError(f"group {group.group_id} may not hold tokens of version {version}: {self._flow.bound}")
        for group, version in sampled:
            if version is not None:
                published = version if group.published is None else min(group.published, version)
                self._flow.bound.set_versions(group, group.declared, published)

    def _count(self, groups: Collection[Group], publish: Publish) -> None:
        """The rows of these groups have as many tokens as a message says; what was said before stays."""
        said = {group.group_id: group for group in groups}
        for row, tokens in zip(publish.rows, publish.tokens or (), strict=True):
            if row.sample_index >= 0 and row.group_id in said:
                said[row.group_id].tokens.setdefault(row.sample_index, tokens)
        for group in groups:
            self._flow.table.tell(group)

    # Rows go out

    def take(
        self,
        stage: str,
        reader: str,
        *,
        max_groups: int,
        version: int | None = None,
        kinds: Sequence[Kind] = ("train",),
        load: Load | None = None,
    ) -> Take | None:
        """Up to max_groups whole groups that a stage can work on, kinds in the given order; None if there are none, or
        none that the stage's policy gives this reader now.

        version: the sampler's policy version. Training groups are then handed out only as far as they can be trained
        on within the bound, and count as started at that version. load: what the sampler has left to do.
        """
        self._expire()
        controller = self._flow.controller(stage, "group")
        if max_groups < 1:
            raise ValueError(f"{max_groups} groups were asked for")
        if stage == self._flow.batch_stage and "train" in kinds:
            raise ValueError(f"stage {stage!r} takes batches: use take_batch")
        self._flow.bound.check_sampler_version(version)
        check_load(load)
        picked: list[Key] = []
        self._refused = False
        for kind in dict.fromkeys(kinds):
            gate = self._flow.starter(version) if kind == "train" and version is not None else _always
            keys, refused = controller.pick(kind, max_groups - len(picked), gate, reader, load)
            picked += keys
            self._refused = self._refused or refused
        if not picked:
            return None
        lease = self._flow.lend(controller, reader, picked)
        if version is not None:
            for group in lease.groups.values():
                group.start_lease = lease.id if group.kind == "train" else None
        return self._flow.take_of(lease)

    def take_rows(
        self, stage: str, reader: str, *, max_rows: int, kinds: Sequence[Kind] = ("train", "val")
    ) -> Take | None:
        """Up to max_rows rows that a stage can work on, of any groups; None if there are none."""
        self._expire()
        controller = self._flow.controller(stage, "row")
        if max_rows < 1:
            raise ValueError(f"{max_rows} rows were asked for")
        picked: list[Key] = []
        self._refused = False
        for kind in dict.fromkeys(kinds):
            picked += controller.pick(kind, max_rows - len(picked), _always, reader)[0]
        if not picked:
            return None
        lease = self._flow.lend(controller, reader, picked)
        return self._flow.take_of(lease)

    def take_batch(self, stage: str, reader: str, *, groups: int) -> Take | None:
        """The batch of this version: its groups that have rows, and how many were dropped; None if it has to wait.

        groups: batch_groups. The first call makes `stage` the one that takes batches. A batch ends by `trained`.
        RunError if a row is older than the bound, which only a bug can cause.
        """
        self._expire()
        if groups != self._flow.window.batch:
            raise ValueError(f"a batch of {groups} groups was asked for, and batch_groups is {self._flow.window.batch}")
        controller = self._flow.controller(stage, "group")
        self._flow.bind_batch_stage(controller)
        self._refused = False
        chosen = self._flow.window.choose()
        if chosen is None:
            return None
        victims: list[Unfinished] = []
        if not self._flow.window.is_safe(chosen):
            if not self._discards:
                return None
            victims = self._flow.window.victims(chosen, self._flow.bound.unfinished(self._flow.table.groups()))
        dropped = self._flow.window.take(chosen)
        self._flow.discard(victims)
        keys: list[Key] = [group_id for group_id in chosen if group_id in self._flow.table]
        lease = self._flow.lend(controller, reader, keys)
        lease.window, lease.dropped = tuple(chosen), dropped
        for group in lease.groups.values():
            group.in_batch = True
            self._flow.bound.check_age(group)
        return self._flow.take_of(lease)

    # What readers say about a lease

    def ack(self, lease: int, group_ids: Sequence[int] | None = None) -> None:
        """The reader is done with the rows of a lease (or with those of some groups) at its stage. StaleLease if gone.

        Of a batch this is said by `trained`.
        """
        self._expire(lease)
        entry = self._flow.lease(lease)
        if entry.window is not None:
            raise ValueError(f"lease {lease} is a batch: it ends by trained or release")
        for key, group in list(entry.keys.items()):
            if group_ids is None or group.group_id in group_ids:
                self._flow.table.controllers[entry.stage].done(key)
                del entry.keys[key]
        if not entry.keys:
            self._flow.close(entry)
        self._changed()

    def release(self, lease: int) -> None:
        """The rows of a lease go back, to be taken again, before others. StaleLease if it is gone."""
        self._expire(lease)
        self._flow.put_back(self._flow.lease(lease))
        self._changed()

    def renew(self, lease: int) -> tuple[int, ...]:
        """The lease lasts for its full time from now on; returns ids of groups that were taken away from it.

        StaleLease if it is gone, or if nothing of it is left.
        """
        self._expire(lease)
        return tuple(self._flow.lease(lease).revoked)

    def better_elsewhere(
        self, stage: str, reader: str, group_ids: Sequence[int], load: Load | None = None
    ) -> list[int]:
        """Of groups that a reader has and did not begin, those that it should `release`: the stage's policy knows
        others that have nothing to do, and would be done earlier. load: as in `take`. Changes nothing."""
        check_load(load)
        keys = self._flow.controller(stage, "group").better_elsewhere(reader, group_ids, load)
        return [key for key in keys if isinstance(key, int)]

    def check(self, leases: Sequence[int]) -> None:
        """StaleLease unless all of these leases hold, with all of their groups: the fence before an optimizer step."""
        self._expire(*leases)
        for lease in leases:
            revoked = self._flow.lease(lease).revoked
            if revoked:
                raise StaleLease(f"lease {lease} has lost the groups {revoked}")

    def started(self, lease: int, group_id: int, version: int) -> None:
        """A taken group's oldest token will be of this policy version. ValueError if the bound does not allow it."""
        self._expire(lease)
        entry = self._flow.lease(lease)
        group = entry.groups.get(group_id)
        if group is None:
            raise StaleLease(f"lease {lease} does not cover group {group_id}")
        self._flow.bound.check_sampler_version(version)
        if not self._flow.bound.may_declare(group, version, instead=True):
            raise ValueError(f"group {group_id} may not start at version {version}: {self._flow.bound}")
        group.start_lease = lease
        self._flow.bound.set_versions(group, version, group.published)
        self._changed()

    def drop(self, group_ids: Sequence[int], reason: str, lease: int | None) -> None:
        """Groups leave for a reason ("filtered", "invalid:<why>", ...). Their places in a batch stay, empty; with
        refill they are given up.

        lease: under which they were taken (None: the coordinator's decision); it ends when nothing of it is left.
        StaleLease, and nothing changes, if it does not cover them, or if they are not here.
        """
        self._expire(lease)
        by = None if lease is None else self._flow.lease(lease)
        groups = groups_to_drop(group_ids, by, self._flow.table)
        for group in groups:
            self._flow.drop(group, reason, by)
        if by is not None and by.window is None and not by.keys:
            self._flow.close(by)
        self._changed()

    def trained(self, lease: int) -> list[int]:
        """A batch has been trained on: its groups leave. Returns their ids. StaleLease at a second call."""
        self._expire(lease)
        entry = self._flow.lease(lease)
        if entry.window is None:
            raise ValueError(f"lease {lease} is not a batch: it ends by ack or release")
        groups = list(entry.groups.values())
        for group in groups:
            self.ledger.train(group.group_id)
            self._flow.leave(group, entry)
        self._flow.window.consume(entry.dropped)
        self._flow.close(entry)
        self._changed()
        return [group.group_id for group in groups]

    def finish_val(self, group_ids: Sequence[int]) -> None:
        """Validation groups leave. Those that have left already are passed over."""
        self._expire()
        for group_id in group_ids:
            group = self._flow.table.get(group_id)
            if group is None:
                continue
            if group.kind != "val":
                raise ValueError(f"group {group_id} is a training group: it ends by trained or drop")
            self.ledger.val_ended += 1
            self._flow.leave(group, None)
        self._changed()

    # The run's clockwork

    def advance(self, version: int) -> None:
        """The next version begins; the batch of the last one must have been trained on."""
        self._expire()
        assert version == self.version + 1, f"version {self.version} cannot be followed by {version}"
        self._flow.window.advance()
        self.ledger.check()
        assert self.ledger.in_flight + self.ledger.val_admitted - self.ledger.val_ended == len(self._flow.table)
        self._changed()

    def expire(self) -> list[ExpiredLease]:
        """End the leases whose time is over; returns those that have ended so since the last call."""
        self._expire()
        expired = list(self._flow.expired)
        self._flow.expired.clear()
        return expired

    def retire(self, reader: str) -> None:
        """A reader is gone: its leases go back, and its slab is sealed after what it published."""
        self._expire()
        for lease in self._flow.leases.of_reader(reader):
            self._flow.put_back(lease)
        self._flow.table.gone(reader)
        self.warehouse.seal(reader)
        self._changed()

    def ask(self, method: str, *args: Any, done: Sequence[int] = (), **kwargs: Any) -> Answer:
        """The answer of `take`, `take_rows` or `take_batch`, with the `seq` at which it was given.

        done: leases that are acknowledged before; if one is over, StaleLease, and nothing is taken.
        """
        assert method in ("take", "take_rows", "take_batch"), method
        for lease in done:
            self._flow.lease(lease)
        for lease in done:
            self.ack(lease)
        take = getattr(self, method)(*args, **kwargs)
        return Answer(take, self.seq, self._refused)

    def ledger_counts(self) -> dict[str, Any]:
        """The ledger in numbers: admitted, trained, dropped (by reason), in_flight, val_admitted, val_ended."""
        return self.ledger.counts()

    def snapshot(self) -> dict[str, Any]:
        """What a later dock needs to go on: the version to train next, the ledger, the training groups in flight."""
        groups = sorted((group.group_id, group.attempt) for group in self._flow.table.groups() if group.kind == "train")
        return {
            "version": self._flow.window.newest_version,
            "ledger": self.ledger.snapshot(),
            "in_flight": [list(group) for group in groups],
            "tombstones": [list(entry) for entry in sorted(self._flow.window.tombstones.items())],
        }

    def restore(self, snapshot: dict[str, Any]) -> list[int]:
        """Go on from a snapshot, before anything is admitted. Returns the ids to admit again, in order."""
        assert not len(self._flow.table), "a dock in use cannot be restored"
        version, tombstones = snapshot["version"], [(entry[0], entry[1]) for entry in snapshot["tombstones"]]
        self.ledger.restore(snapshot["ledger"])
        self._attempts = dict(snapshot["in_flight"])
        again = sorted(self._attempts)
        if self._flow.window.ordered and not self._flow.window.refill:
            dropped = {group_id for group_id, _ in tombstones}
            check_order(version, self._flow.window.batch, self.ledger, dropped, again)
        self._flow.window.restore(version, tombstones)
        self._changed()
        return again

    def close(self) -> None:
        """Remove the payload. A second call does nothing."""
        self.warehouse.close()

    # Payload

    def lease_slab(
        self, owner: str, min_bytes: int, giving_up: int | None = None, node: int = HOME
    ) -> SlabLease | None:
        """A slab of a node to write into; see Warehouse."""
        self._expire()
        changes = self.warehouse.changes
        lease = self.warehouse.lease_slab(owner, min_bytes, giving_up, node)
        if self.warehouse.changes != changes:
            # Its keeper waits for what it has to do.
            self._changed()
        return lease

    def open_warehouse(self, name: str, folder: str, runs: str) -> int:
        """Another node has a warehouse from now on; see Warehouses."""
        self._expire()
        node = self.warehouse.open(name, folder, runs, self._clock())
        self._changed()
        return node

    def chores(self, node: int, beat: int, done: Sequence[tuple[int, str]] = ()) -> list[Chore] | None:
        """What the keeper of a node's warehouse has to do, None if nothing; see Warehouses. StaleSlab if it is lost."""
        self._expire()
        chores = self.warehouse.chores(node, beat, done, self._clock())
        if done:
            self._changed()
        return chores or None

    def places(self) -> list[NodePlace]:
        """The warehouses besides that of the dock's own node."""
        return self.warehouse.places()

    def place_after(self, node: int, runs: str) -> str | None:
        """Where the bytes of a node's warehouse can be had, once it is no longer `runs`; "" if it is lost."""
        self._expire()
        now = next((place.runs for place in self.warehouse.places() if place.node == node), "")
        return None if now == runs else now

    def payload_folder(self) -> str | None:
        """Where slabs can be mapped; None if they are memory of this process."""
        return self.warehouse.folder

    def map_slab(self, slab: int) -> memoryview:
        """The memory of a slab of this process; only for callers in it."""
        return self.warehouse.memory(slab)

    def memory_use(self, node: int = HOME) -> MemoryUse:
        """How full the payload's memory is on a node."""
        return self.warehouse.use(node)

    # For a successor of a killed process

    def expire_now(self) -> None:
        """End the leases whose time is over."""
        self._expire()

    def lose_node(self, node: int) -> None:
        """A node is gone: groups that had rows on it begin again."""
        self.warehouse.lose_node(node)
        self._flow.begin_again_what_is_lost()
        self._changed()

    def renew_all(self) -> None:
        """All leases last for their full time from now on: nobody could say anything while no dock was there."""
        self._flow.renew_all()
        self.warehouse.renew_all(self._clock())

    def bind_batch_stage(self, stage: str) -> None:
        """This stage takes batches, as its first take_batch says."""
        self._flow.bind_batch_stage(self._flow.controller(stage, "group"))

    @property
    def batch_stage(self) -> str | None:
        """The stage that takes batches, once it is known."""
        return self._flow.batch_stage

    def base(self) -> dict[str, Any]:
        """Everything as plain values, for `restore_base`."""
        return {
            "seq": self.seq,
            "attempts": list(self._attempts.items()),
            "flow": self._flow.dump(),
            "slabs": self.warehouse.snapshot(),
        }

    def restore_base(self, base: dict[str, Any]) -> None:
        """Go on from a base, before anything else."""
        self.warehouse.restore(base["slabs"])
        self._flow.load(base["flow"])
        self._attempts = dict(base["attempts"])
        self.seq = base["seq"]

    def next_deadline(self) -> float | None:
        """When the next lease is over, or the next node is lost, if nobody speaks, by the dock's clock; None: never."""
        deadlines = self._flow.leases.next_deadline(), self.warehouse.next_deadline()
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _expire(self, *speakers: int | None) -> None:
        """End overdue leases. That of whoever speaks lives on: nobody has noticed its silence, so nobody was harmed.

        What was on a node that has been silent for too long is lost: its groups begin again.
        """
        if self._flow.expire([lease for lease in speakers if lease is not None]):
            self._changed()
        for node in self.warehouse.overdue(self._clock()) if self.loses_nodes_by_clock else ():
            self.lose_node(node)

    def _changed(self) -> None:
        self.seq += 1


def _always(key: Key) -> bool:
    return True
