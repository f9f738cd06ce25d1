"""Copies many small arrays to where their columns lie, in the order in which they lie in memory.

Whoever makes samples one after the other leaves the arrays of a row beside each other. A copy column by column then
jumps at every array, and each jump waits for memory; row by row it reads on.

A large block is copied by a compiled loop (`cpp/`), which is built when it is first needed; where it cannot be built,
Python copies the same, slower.
"""

from __future__ import annotations

import ctypes
import logging
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, cycle, pairwise
from operator import setitem
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tranship.models.compiled import compiled
from tranship.types import UserError

# Of an array: smaller ones are not worth a look at where they lie, nor a way past the caches.
_WORTH_BYTES = 2048
# From here on a block is copied by the compiled loop.
_LARGE_BYTES = 1 << 19
# Between two pieces other threads have a turn. A block with a longer row is Python's, whose copies let them run.
_PIECE_BYTES = 16 << 20
# A put waits for the compiler, once.
_BUILD_LIMIT_S = 20.0
_SOURCES = Path(__file__).with_name("cpp")
_log = logging.getLogger(__name__)
_set: Any = setitem


class Gathered(NamedTuple):
    """A column of one-dimensional arrays. dtype: as it is stored. as_stored: the arrays are of it to the order of their
    bytes. lengths: int64 [N, 1], contiguous."""

    arrays: list[np.ndarray]
    dtype: np.dtype
    as_stored: bool
    lengths: np.ndarray


class _Column(ctypes.Structure):
    """What `cpp/gather.cpp` has to know of a column."""

    _fields_ = [
        ("arrays", ctypes.py_object),
        ("out", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("itemsize", ctypes.c_int64),
    ]


def gather(columns: Sequence[tuple[memoryview, Gathered]]) -> None:
    """Copy the arrays of columns, one behind the other, each column into the bytes that are given with it."""
    by_row = _is_by_row(columns)
    if sum(len(out) for out, _ in columns) >= _LARGE_BYTES and _gather_compiled(columns, by_row=by_row):
        return
    if by_row and _gather_by_row(columns):
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


def _gather_compiled(columns: Sequence[tuple[memoryview, Gathered]], *, by_row: bool) -> bool:
    """Whether it could be done: there is the compiled loop, and the arrays lie as they are stored."""
    loop = _loop() if all(column.as_stored for _, column in columns) else None
    ends = None if loop is None else _pieces(columns)
    if loop is None or ends is None:
        return False
    outs = [np.frombuffer(out, np.uint8) for out, _ in columns]
    places = (_Column * len(columns))()
    for place, out, (_, column) in zip(places, outs, columns, strict=True):
        assert int(column.lengths.sum()) * column.dtype.itemsize == len(out), "lengths that do not fill the column"
        place.arrays, place.out, place.itemsize = column.arrays, out.ctypes.data, column.dtype.itemsize
        place.lengths = column.lengths.ctypes.data
    past_caches = sum(map(len, outs)) >= _WORTH_BYTES * ends[-1] * len(columns)
    return not any(loop(places, len(columns), first, end, by_row, past_caches) for first, end in pairwise(ends))


def _pieces(columns: Sequence[tuple[memoryview, Gathered]]) -> list[int] | None:
    """The rows at which pieces end, from 0 on; None if one row is more than a piece."""
    nbytes = sum(column.lengths[:, 0] * column.dtype.itemsize for _, column in columns)
    assert isinstance(nbytes, np.ndarray), "no columns"
    if int(nbytes.max()) > _PIECE_BYTES:
        return None
    ends = np.cumsum(nbytes)
    cuts = np.searchsorted(ends, np.arange(_PIECE_BYTES, int(ends[-1]), _PIECE_BYTES))
    return [0, *(cut for cut in dict.fromkeys(cuts.tolist()) if cut), len(nbytes)]


@lru_cache(maxsize=1)
def _loop() -> Any:
    """The compiled loop; None where it cannot be built."""
    try:
        loop = ctypes.PyDLL(str(compiled(_SOURCES, limit_s=_BUILD_LIMIT_S))).gather
    except (AttributeError, OSError, UserError) as error:
        _log.info("the dock copies arrays without its compiled loop, slower: %s", error)
        return None
    loop.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 3, *[ctypes.c_int] * 2]
    return loop


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
