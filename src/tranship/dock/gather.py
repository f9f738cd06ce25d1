"""Copies many small arrays to where their columns lie, in the order in which they lie in memory.

Whoever makes samples one after the other leaves the arrays of a row beside each other. A copy column by column then
jumps at every array, and each jump waits for memory; row by row it reads on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain, cycle
from operator import setitem
from typing import Any, NamedTuple

import numpy as np

_WORTH_BYTES = 2048
_set: Any = setitem


class Gathered(NamedTuple):
    """A column of one-dimensional arrays of one dtype. lengths: int64 [N, 1]."""

    arrays: Sequence[np.ndarray]
    dtype: np.dtype
    lengths: np.ndarray


def gather(columns: Sequence[tuple[memoryview, Gathered]]) -> None:
    """Copy the arrays of columns, one behind the other, each column into the bytes that are given with it."""
    if _is_by_row(columns) and _gather_by_row(columns):
        return
    for out, column in columns:
        np.concatenate(column.arrays, out=np.frombuffer(out, column.dtype), casting="equiv")


def _is_by_row(columns: Sequence[tuple[memoryview, Gathered]]) -> bool:
    """Whether the first row's arrays are nearer to each other than to the next row's, and large enough to matter."""
    if len(columns) < 2 or len(columns[0][1].arrays) < 2:
        return False
    nbytes, count = sum(len(out) for out, _ in columns), sum(len(column.arrays) for _, column in columns)
    if nbytes < _WORTH_BYTES * count:
        return False
    first, next_row = (_address(array) for array in columns[0][1].arrays[:2])
    return abs(_address(columns[1][1].arrays[0]) - first) < abs(next_row - first)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _gather_by_row(columns: Sequence[tuple[memoryview, Gathered]]) -> bool:
    """Whether it could be done: Python's views know fewer formats than numpy."""
    slices: dict[bytes, list[slice]] = {}
    places = []
    for _, column in columns:
        key = column.lengths.tobytes()
        if key not in slices:
            ends = np.cumsum(column.lengths).tolist()
            slices[key] = list(map(slice, [0, *ends[:-1]], ends))
        places.append(slices[key])
    rows: Any = zip(*(column.arrays for _, column in columns), strict=True)
    try:
        outs = [_like(out, column.arrays[0]) for out, column in columns]
        ordered = chain.from_iterable(zip(*places, strict=True))
        copies = map(_set, cycle(outs), ordered, chain.from_iterable(rows))
        deque(copies, maxlen=0)
    except (ValueError, RuntimeError):
        return False
    return True


def _like(out: memoryview, array: Any) -> memoryview:
    """The bytes as items of an array's format."""
    layout: Any = memoryview(array).format
    return out.cast(layout)
