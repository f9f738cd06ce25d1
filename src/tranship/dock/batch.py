"""What a reader gets from a take: identities, groups, and the values of the columns that its stage reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tranship.dock.messages import BlockRef, GroupEntry, Kind, Take
from tranship.dock.reader import BlockReader
from tranship.types import SampleId


@dataclass(frozen=True)
class GroupView:
    """One group of a batch. rows: where its taken samples are in it. size: samples of the whole group.

    oldest_version: the oldest policy version of any of its tokens; None before it is sampled.
    """

    group_id: int
    size: int
    kind: Kind
    rows: range
    attempt: int = 0
    oldest_version: int | None = None


class Batch:
    """Rows on lease. Values are read where they lie: arrays are read-only views.

    Views hold until ack, release, trained or drop of the lease, or until it expires. Copy what is needed for longer.
    `window` lists all groups of a training batch, the dropped ones too; `version` is the dock's at the take.
    """

    def __init__(self, take: Take, reader: BlockReader) -> None:
        self.lease = take.lease
        self.stage = take.stage
        self.version = take.version
        self.window = take.window
        self.num_dropped = take.num_dropped
        self.ids: list[SampleId] = []
        self.groups: list[GroupView] = []
        self._entries = take.groups
        self._reader = reader
        self._columns: dict[str, list[Any]] = {}
        self._group_columns: dict[str, list[Any]] = {}
        for entry in take.groups:
            rows = range(len(self.ids), len(self.ids) + len(entry.rows))
            self.ids += [row for row, _ in entry.rows]
            self.groups.append(
                GroupView(entry.group_id, entry.size, entry.kind, rows, entry.attempt, entry.oldest_version)
            )

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, column: str) -> list[Any]:
        """One value per sample row; a group's own column is repeated by reference. KeyError if it is not read here.

        StaleSlab if the lease ended so long ago that the memory serves others.
        """
        if column not in self._columns:
            self._columns[column] = [
                value for place, entry in enumerate(self._entries) for value in self._row_values(place, entry, column)
            ]
        return self._columns[column]

    def group(self, column: str) -> list[Any]:
        """One value per group, of a group's own column. KeyError if it is not read here, or lies on samples."""
        if column not in self._group_columns:
            self._group_columns[column] = [self._own_value(entry, column) for entry in self._entries]
        return self._group_columns[column]

    def _row_values(self, place: int, entry: GroupEntry, column: str) -> list[Any]:
        if column in entry.shared:
            return [self.group(column)[place]] * len(entry.rows)
        values = []
        for row, refs in entry.rows:
            if column not in refs:
                raise KeyError(f"stage {self.stage!r} does not read column {column!r}: it reads {sorted(refs)}")
            values.append(self._value(refs[column], row.group_id, row.sample_index, column))
        return values

    def _own_value(self, entry: GroupEntry, column: str) -> Any:
        if column not in entry.shared:
            raise KeyError(
                f"{column!r} is no column of a group that stage {self.stage!r} reads: {sorted(entry.shared)}"
            )
        return self._value(entry.shared[column], entry.group_id, -1, column)

    def _value(self, ref: BlockRef, group_id: int, sample_index: int, column: str) -> Any:
        block = self._reader.open(ref)
        return block.column(column)[block.row_of(group_id, sample_index)]
