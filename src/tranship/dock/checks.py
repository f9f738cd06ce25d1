"""Whether a message to the dock makes sense, before it changes anything."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tranship.dock.errors import StaleLease
from tranship.dock.group import OWN, Group
from tranship.dock.leases import Lease
from tranship.dock.ledger import Ledger
from tranship.dock.messages import Admission, Load, Publish
from tranship.dock.rows import GroupRun, Rows
from tranship.dock.table import GroupTable
from tranship.types import SampleId, UserError

MAX_ROWS = 1 << 20
# Steps a second, far beyond any engine; sums of speeds and their products stay finite.
_MAX_SPEED = 1e12


def check_admissions(groups: Sequence[Admission], table: GroupTable, ledger: Ledger, room: int) -> None:
    """ValueError if there is no room for the training groups among them, an id is or was in use, or they have more
    than MAX_ROWS rows: what a message makes the dock remember is bounded by this, not by the number that it names."""
    ids = [admission.group_id for admission in groups]
    num_train = sum(admission.kind == "train" for admission in groups)
    if num_train > room:
        raise ValueError(f"{num_train} groups were to be admitted, and there is room for {room}")
    if len(set(ids)) != len(ids):
        raise ValueError(f"a group was to be admitted twice: {ids}")
    if sum(max(0, admission.size) for admission in groups) > MAX_ROWS:
        raise ValueError(f"more than {MAX_ROWS} rows were to be admitted at once")
    for admission in groups:
        group_id, kind = admission.group_id, admission.kind
        if kind not in ("train", "val") or admission.size < 1:
            raise ValueError(f"group {group_id} cannot be of kind {kind!r} with {admission.size} samples")
        if admission.expected_tokens < 1:
            raise ValueError(f"group {group_id} cannot be predicted to have {admission.expected_tokens} tokens")
        if group_id in table:
            raise ValueError(f"group {group_id} cannot be admitted: it is in the dock")
        if kind == "train" and (group_id < 0 or ledger.has_ended(group_id)):
            raise ValueError(f"group {group_id} cannot be admitted: {ledger.outcome(group_id) or 'its id is negative'}")


def check_load(load: Load | None) -> None:
    """ValueError unless what a reader says of itself are numbers that can be reckoned with."""
    if load is None:
        return
    has_speed = load.speed is None or 0 < load.speed <= _MAX_SPEED
    if not (has_speed and 0 <= load.tokens < math.inf and 1 <= load.slots < 1 << 32):
        raise ValueError(f"no reader can be as loaded as {load}")


def check_tokens(publish: Publish) -> None:
    """ValueError unless a message that says how long its rows are says so of each one."""
    tokens = publish.tokens
    if tokens is not None and (len(tokens) != len(publish.rows) or min(tokens, default=0) < 0):
        raise ValueError(
            f"{len(tokens)} token counts, the least {min(tokens, default=0)}, for {len(publish.rows)} rows"
        )


def rows_to_publish(
    rows: Sequence[SampleId], columns: Sequence[str], lease: Lease | None, table: GroupTable
) -> tuple[list[Group], list[tuple[SampleId, Group]]]:
    """The groups of which a message brings columns for all samples that none had before, and the other rows, with
    their groups.

    Rows whose group was taken away from the lease are passed over. StaleLease if no others are left, or if the lease
    never covered one; ValueError for a row that does not exist.
    """
    revoked = () if lease is None else lease.revoked
    rows = Rows.of(rows)
    whole: list[Group] = []
    single: list[tuple[SampleId, Group]] = []
    for run in rows.group_runs():
        if run.group_id in revoked:
            continue
        group = table.get(run.group_id)
        if group is not None and _is_whole(group, run, columns, lease):
            whole.append(group)
        else:
            single += [(row, _group_of(row, lease, table)) for row in rows[run.first : run.first + run.count]]
    if rows and not whole and not single:
        raise StaleLease(f"the groups of {list(rows)[:4]} have left the dock")
    return whole, single


def _is_whole(group: Group, run: GroupRun, columns: Sequence[str], lease: Lease | None) -> bool:
    """Whether these are all samples of a group that a lease covers as a whole, and the columns are new to it."""
    covered = lease is None or group.group_id in lease.keys
    is_all = run.sample_index == 0 and run.count == group.size and run.attempt == group.attempt
    return covered and is_all and group.has_none_of(columns)


def _group_of(row: SampleId, lease: Lease | None, table: GroupTable) -> Group:
    group = table.get(row.group_id)
    if group is None:
        raise StaleLease(f"group {row.group_id} is not in the dock")
    if row.attempt != group.attempt or not OWN <= row.sample_index < group.size:
        raise ValueError(f"{row} is not a row of group {row.group_id} ({group.size} samples, attempt {group.attempt})")
    if lease is not None and row.group_id not in lease.keys and (row.group_id, row.sample_index) not in lease.keys:
        raise StaleLease(f"lease {lease.id} does not cover {row}")
    return group


def groups_to_drop(group_ids: Sequence[int], by: Lease | None, table: GroupTable) -> list[Group]:
    """The groups that a reader may drop; those that were taken away from its lease are passed over.

    StaleLease if no others are left, if the lease does not cover one, or if one is being trained on elsewhere.
    """
    kept = [group_id for group_id in dict.fromkeys(group_ids) if by is None or group_id not in by.revoked]
    if group_ids and not kept:
        raise StaleLease(f"the groups {list(group_ids)[:4]} have left the dock")
    covered = None if by is None else by.groups
    groups = []
    for group_id in kept:
        group = table.get(group_id) if covered is None else covered.get(group_id)
        if group is None:
            where = "it is not in the dock" if by is None else f"lease {by.id} does not cover it"
            raise StaleLease(f"group {group_id} cannot be dropped: {where}")
        if group.in_batch and (by is None or by.window is None):
            raise StaleLease(f"group {group_id} cannot be dropped: it is being trained on")
        groups.append(group)
    return groups


def check_order(version: int, batch: int, ledger: Ledger, tombstones: set[int], again: Sequence[int]) -> None:
    """UserError unless what has ended is the batches so far, in order: other batches would wait for ever."""
    first = version * batch
    ended = set(ledger.ended_from(first)) - tombstones
    early = [group_id for group_id in (*again, *tombstones) if group_id < first]
    if ended or early:
        raise UserError(
            f"the snapshot of version {version} does not go on in order with {batch} groups a batch "
            f"(groups {sorted(ended or early)[:4]}): keep train.batch_size, rollout.group_size, dock.staleness and "
            "run.deterministic as they were"
        )
