"""What a reader gets from a take: identities, groups, and the values of the columns that its stage reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from tranship.dock.block import Ragged
from tranship.dock.buffers import Buffers
from tranship.dock.errors import StaleSlab
from tranship.dock.group import OWN
from tranship.dock.messages import BlockRef, GroupEntry, Kind, Take
from tranship.dock.reader import BlockReader, Run
from tranship.types import SampleId


@dataclass(frozen=True)
class GroupView:
    """One group of a batch. rows: where its taken samples are in it. size: samples of the whole group.

    oldest_version: the oldest policy version of any of its tokens; None before it is sampled. expected_tokens: how long
    one of its responses was predicted to be.
    """

    group_id: int
    size: int
    kind: Kind
    rows: range
    attempt: int = 0
    oldest_version: int | None = None
    expected_tokens: int = 1


@dataclass(frozen=True)
class _Segment:
    """Consecutive rows of a batch whose column lies in one block."""

    ref: BlockRef
    first: int
    end: int


class Batch:
    """Rows on lease. Values are read where they lie: arrays are read-only views.

    Views hold until ack, release, trained or drop of the lease, or until it expires. Copy what is needed for longer.
    `window` lists all groups of a training batch, the dropped ones too; `version` is the dock's at the take.
    """

    def __init__(self, take: Take, reader: BlockReader, let_go: Callable[[int], None] = lambda lease: None) -> None:
        self.lease = take.lease
        self.stage = take.stage
        self.version = take.version
        self.window = take.window
        self.num_dropped = take.num_dropped
        self._entries = take.groups
        self._reader = reader
        self._let_go = let_go
        self._columns: dict[str, list[Any]] = {}
        self._group_columns: dict[str, list[Any]] = {}
        self._runs: dict[tuple[BlockRef, int, int], list[tuple[int, int]]] = {}

    @cached_property
    def ids(self) -> list[SampleId]:
        """The identities of the rows."""
        return [SampleId(entry.group_id, index, entry.attempt) for entry in self._entries for index in entry.samples]

    @cached_property
    def groups(self) -> list[GroupView]:
        """The groups of the rows, in order."""
        views, start = [], 0
        for entry in self._entries:
            rows = range(start, start + len(entry.samples))
            start = rows.stop
            head = entry.group_id, entry.size, entry.kind
            views.append(GroupView(*head, rows, entry.attempt, entry.oldest_version, entry.expected_tokens))
        return views

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, column: str) -> list[Any]:
        """One value per sample row; a group's own column is repeated by reference. KeyError if it is not read here.

        StaleSlab if the lease ended so long ago that the memory serves others.
        """
        if column not in self._columns:
            with self._unless_recycled([column]):
                self._columns[column] = [
                    value
                    for place, entry in enumerate(self._entries)
                    for value in self._row_values(place, entry, column)
                ]
        return self._columns[column]

    def group(self, column: str) -> list[Any]:
        """One value per group, of a group's own column. KeyError if it is not read here, or lies on samples."""
        if column not in self._group_columns:
            refs = [self._own_ref(entry, column) for entry in self._entries]
            with self._unless_recycled([column]):
                self._group_columns[column] = [
                    self._value(ref, entry.group_id, OWN, column)
                    for ref, entry in zip(refs, self._entries, strict=True)
                ]
        return self._group_columns[column]

    # Whole columns at once

    def packed(self, columns: Sequence[str], buffers: Buffers) -> dict[str, Ragged]:
        """Columns of all rows (a group's own column: of all groups), copied once into kept memory, one message at most.

        The result holds until the next `packed` into the same buffers. KeyError for a column that is not read here,
        ValueError for one whose values are not arrays of one dtype and number of dimensions, or single numbers of one
        type, StaleSlab.
        """
        runs: list[Run] = []
        results: dict[str, Ragged] = {}
        with self._unless_recycled(columns, is_copy=True):
            found = {name: self._pieces(name) for name in columns}
            for name, pieces in found.items():
                results[name] = self._lay_out(name, pieces, buffers, runs)
            self._reader.read(runs, self._refs(found))
        for name, ragged in results.items():
            if ragged.values.dtype == np.bool_ and ragged.values.size and int(ragged.values.view(np.uint8).max()) > 1:
                raise ValueError(f"malformed block: column {name!r} has a bool that is neither 0 nor 1")
        return results

    def views(self, column: str) -> list[Ragged]:
        """A column of all rows without a copy: pieces in row order, each of which lies in one block. Read-only.

        Only where the payload is on this node. Errors as for `packed`; the views hold as long as the lease.
        """
        pieces = []
        with self._unless_recycled([column]):
            for segment in self._segments(column):
                block = self._reader.open(segment.ref)
                values = block.column(column)
                pieces += [self._piece(values, column, run) for run in self._runs_of(segment, column, block)]
        return pieces

    @contextmanager
    def _unless_recycled(self, columns: Sequence[str], *, is_copy: bool = False) -> Iterator[None]:
        """What is read inside was there to the end (which `is_copy` found out already); else StaleSlab, also instead of
        an error that bytes of other rows led to, and the lease ends at once: its rows go back."""
        try:
            try:
                yield
            except (ValueError, LookupError):
                self._check(columns)
                raise
            if not is_copy:
                self._check(columns)
        except StaleSlab:
            self._let_go(self.lease)
            raise

    def _check(self, columns: Sequence[str]) -> None:
        """StaleSlab, and nothing of the columns is kept, if memory that they lie in holds something else by now."""
        try:
            self._reader.check([segment.ref for column in columns for segment in self._segments(column)])
        except StaleSlab:
            for column in columns:
                self._columns.pop(column, None)
                self._group_columns.pop(column, None)
            raise

    def _pieces(self, column: str) -> list[tuple[BlockRef, Any, tuple[int, int]]]:
        """(block reference, column, [first, end) of its rows) for each run of a column."""
        found = []
        segments = self._segments(column)
        blocks = self._reader.heads([one.ref for one in segments])
        for segment, block in zip(segments, blocks, strict=True):
            values = block.column(column)
            found += [(segment.ref, values, run) for run in self._runs_of(segment, column, block)]
        return found

    def _lay_out(self, name: str, pieces: list[Any], buffers: Buffers, runs: list[Run]) -> Ragged:
        """Room for a column in kept memory; appends what has to be read into it."""
        parts = [self._piece(values, name, run) for _, values, run in pieces]
        first = parts[0]
        if any(
            part.values.dtype != first.values.dtype or part.shapes.shape[1] != first.shapes.shape[1] for part in parts
        ):
            raise ValueError(f"column {name!r} has values of several dtypes or numbers of dimensions")
        if len(parts) == 1:
            ends, shapes = first.ends, first.shapes
        else:
            starts = np.cumsum([0, *(part.ends[-1] for part in parts)])
            ends = np.concatenate([[0], *(part.ends[1:] + start for part, start in zip(parts, starts, strict=False))])
            shapes = np.concatenate([part.shapes for part in parts])
        values = buffers.take(name, first.values.dtype, int(ends[-1]))
        out, at = values.view(np.uint8), 0
        for ref, column, run in pieces:
            offset, nbytes = column.span(*run)
            if nbytes:
                runs.append(Run(ref, offset, out[at : at + nbytes]))
            at += nbytes
        return Ragged(values, ends, shapes, first.is_bfloat16)

    @staticmethod
    def _piece(values: Any, name: str, run: tuple[int, int]) -> Ragged:
        try:
            return values.piece(*run)
        except ValueError as error:
            raise ValueError(f"column {name!r} cannot be packed: {error}") from error

    @staticmethod
    def _refs(found: dict[str, list[tuple[BlockRef, Any, tuple[int, int]]]]) -> list[BlockRef]:
        return list(dict.fromkeys(ref for pieces in found.values() for ref, _, _ in pieces))

    def _segments(self, column: str) -> list[_Segment]:
        """Where a column lies: neighbours in one block are one segment. Counted in groups for a group's own column."""
        refs: list[tuple[BlockRef, int]] = []
        for alike in self._alike:
            if column in self._entries[0].shared:
                refs.append((self._own_ref(alike[0], column), len(alike)))
                continue
            where = self._where(alike[0], column)
            if type(where) is BlockRef:
                refs.append((where, sum([len(entry.samples) for entry in alike])))
            else:
                refs += [(ref, 1) for ref in where * len(alike)]
        segments: list[_Segment] = []
        at = first = 0
        last: BlockRef | None = None
        for ref, count in refs:
            if last is not None and ref is not last and ref != last:
                segments.append(_Segment(last, first, at))
                first = at
            last = ref
            at += count
        if last is not None:
            segments.append(_Segment(last, first, at))
        return segments

    def _runs_of(self, segment: _Segment, column: str, block: Any) -> list[tuple[int, int]]:
        if column in self._entries[0].shared:
            own = [(entry.group_id, OWN) for entry in self._entries[segment.first : segment.end]]
            return block.runs_of(np.array(own, np.int64))
        key = (segment.ref, segment.first, segment.end)
        if key not in self._runs:
            self._runs[key] = block.runs_of(self._row_ids[segment.first : segment.end])
        return self._runs[key]

    @cached_property
    def _alike(self) -> list[Sequence[GroupEntry]]:
        """All entries, as runs of neighbours that share the record of where their columns lie."""
        if not self._entries:
            return []
        keys = [(id(entry.shared), id(entry.refs)) for entry in self._entries]
        breaks = [at for at in range(1, len(keys)) if keys[at] != keys[at - 1]]
        return [self._entries[first:end] for first, end in pairwise([0, *breaks, len(keys)])]

    @cached_property
    def _count(self) -> int:
        return sum(len(entry.samples) for entry in self._entries)

    @cached_property
    def _row_ids(self) -> np.ndarray:
        """int64 [N, 2]: group id and sample index of each row."""
        counts = [len(entry.samples) for entry in self._entries]
        ids = np.empty((self._count, 2), np.int64)
        ids[:, 0] = np.repeat([entry.group_id for entry in self._entries], counts)
        ids[:, 1] = [index for entry in self._entries for index in entry.samples]
        return ids

    # One value after the other

    def _row_values(self, place: int, entry: GroupEntry, column: str) -> list[Any]:
        if column in entry.shared:
            return [self.group(column)[place]] * len(entry.samples)
        where = self._where(entry, column)
        refs = [where] * len(entry.samples) if type(where) is BlockRef else where
        return [self._value(ref, entry.group_id, index, column) for index, ref in zip(entry.samples, refs, strict=True)]

    def _where(self, entry: GroupEntry, column: str) -> Any:
        if column not in entry.refs:
            raise KeyError(f"stage {self.stage!r} does not read column {column!r}: it reads {sorted(entry.refs)}")
        return entry.refs[column]

    def _own_ref(self, entry: GroupEntry, column: str) -> BlockRef:
        if column not in entry.shared:
            raise KeyError(
                f"{column!r} is no column of a group that stage {self.stage!r} reads: {sorted(entry.shared)}"
            )
        return entry.shared[column]

    def _value(self, ref: BlockRef, group_id: int, sample_index: int, column: str) -> Any:
        block = self._reader.open(ref)
        return block.column(column)[block.row_of(group_id, sample_index)]
