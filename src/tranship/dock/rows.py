"""Identities of many rows as one array: what a message carries, and what is checked without a look at each row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, starmap
from typing import NamedTuple, overload

import numpy as np

from tranship.types import SampleId

# From here on a pass over the array costs less than one over its rows.
_MANY = 128


class GroupRun(NamedTuple):
    """Neighbours of one group and attempt whose sample indices go up by one: `count` rows from `first` on."""

    first: int
    count: int
    group_id: int
    sample_index: int
    attempt: int


class Rows(Sequence[SampleId]):
    """Identities in order. array: int64 [N, 3], the fields of SampleId; not to be changed."""

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @staticmethod
    def of(rows: Sequence[SampleId]) -> Rows:
        """The same rows as an array. OverflowError for a number that has more than 64 bits."""
        if isinstance(rows, Rows):
            return rows
        return Rows(np.fromiter(chain.from_iterable(rows), "<i8", 3 * len(rows)).reshape(len(rows), 3))

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[SampleId]:
        return starmap(SampleId, self.array.tolist())

    @overload
    def __getitem__(self, place: int) -> SampleId: ...
    @overload
    def __getitem__(self, place: slice) -> Rows: ...
    def __getitem__(self, place: int | slice) -> SampleId | Rows:
        if isinstance(place, slice):
            return Rows(self.array[place])
        return SampleId(*self.array[place].tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return f"Rows({list(self)})"

    @property
    def has_repeats(self) -> bool:
        """Whether a sample stands in it twice."""
        if len(self) < _MANY:
            return len({(row[0], row[1]) for row in self.array.tolist()}) != len(self)
        groups, indices = self.array[:, 0], self.array[:, 1]
        later = (groups[1:] > groups[:-1]) | ((groups[1:] == groups[:-1]) & (indices[1:] > indices[:-1]))
        return not later.all() and len(set(zip(groups.tolist(), indices.tolist(), strict=True))) != len(self)

    def group_runs(self) -> list[GroupRun]:
        """All rows as the longest runs, in order."""
        if len(self) < _MANY:
            return _runs_of_few(self.array.tolist())
        before, after = self.array[:-1], self.array[1:]
        goes_on = (after[:, 0] == before[:, 0]) & (after[:, 1] == before[:, 1] + 1) & (after[:, 2] == before[:, 2])
        starts = np.concatenate([[0], np.flatnonzero(~goes_on) + 1])
        counts = np.diff(starts, append=len(self))
        heads = self.array[starts].tolist()
        return [
            GroupRun(first, n, *head) for first, n, head in zip(starts.tolist(), counts.tolist(), heads, strict=True)
        ]


def _runs_of_few(rows: list[list[int]]) -> list[GroupRun]:
    runs: list[GroupRun] = []
    first = 0
    for end in range(1, len(rows) + 1):
        group_id, sample_index, attempt = rows[end - 1]
        if end == len(rows) or rows[end] != [group_id, sample_index + 1, attempt]:
            runs.append(GroupRun(first, end - first, group_id, rows[first][1], attempt))
            first = end
    return runs
