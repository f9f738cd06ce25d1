"""The one format of rows and columns: in memory, on the wire and in a journal.

    header (64 bytes)  magic, format, flags, counts, total size, generation, checksum
    directory          per column: name, kind, dtype, number of dimensions, where its lengths and values lie
    row identities     int64 [N, 3]
    lengths            per column: int64 [N, ndim] shapes, or int64 [N] bytes of each value
    values             per column: contiguous, in row order

What comes before the values is the head: it says where each value lies, so that a reader far away asks for it first.

Every section starts at a multiple of 64 bytes; all numbers are little-endian. A column whose values are arrays of one
dtype and number of dimensions is stored raw, and read without a copy; one of numpy's scalars of one dtype, or of
Python's floats, ints or bools alone, is one array; any other column is stored value by value (`values.py`). Nothing is
believed: sizes are checked before memory is taken, and malformed input is a ValueError.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any

import numpy as np
import xxhash

from tranship.dock.gather import Gathered, gather
from tranship.dock.rows import Rows
from tranship.dock.values import BFLOAT16, Bfloat16, code_of, dtype_of, pack_value, unpack_value
from tranship.types import SampleId

ALIGNMENT = 64
_MAGIC = b"TSHPBLK\x01"
_HEADER = struct.Struct("<8sHHIIIQQQ")
_CHECKSUM_AT = _HEADER.size - 8
_COLUMN = struct.Struct("<HBBIQQQ")
_HAS_CHECKSUM = 1
_RAW, _OBJECTS, _SCALARS, _NUMBERS = 0, 1, 2, 3
_MAX_NDIM = 32
_INT64 = np.dtype("<i8")
_NUMBER_TYPES = {float: np.dtype("<f8"), int: _INT64, bool: np.dtype(np.bool_)}
_dtype_of, _ndim_of = attrgetter("dtype"), attrgetter("ndim")


def align(offset: int) -> int:
    """The next multiple of the alignment."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


@dataclass
class _Part:
    """A column, ready to be written."""

    name: bytes
    kind: int
    dtype: int
    ndim: int
    lengths: np.ndarray
    nbytes: int
    write: Callable[[memoryview], None] | Gathered
    lengths_at: int = 0
    values_at: int = 0


class PackedBlock:
    """Rows and columns whose size is known, to be written into a buffer of that size."""

    def __init__(self, ids: np.ndarray, parts: list[_Part]) -> None:
        self._ids = ids
        self._parts = parts
        self._directory_bytes = sum(_COLUMN.size + len(part.name) for part in parts)
        at = align(ALIGNMENT + self._directory_bytes)
        self._ids_at = at
        at = align(at + ids.nbytes)
        for part in parts:
            part.lengths_at = at
            at = align(at + part.lengths.nbytes)
        self.head_bytes = at
        for part in parts:
            part.values_at = at
            at = align(at + part.nbytes)
        self.nbytes = at

    def write_into(self, buffer: memoryview, *, generation: int = 0, checksum: bool = False) -> None:
        """Write the block at the start of `buffer` (writable, at least nbytes long). Each value is copied once."""
        buffer = buffer[: self.nbytes]
        assert len(buffer) == self.nbytes, f"a block of {self.nbytes} bytes into a buffer of {len(buffer)}"
        buffer[: self.head_bytes] = self._head(generation, _HAS_CHECKSUM if checksum else 0)
        gathered = []
        for part in self._parts:
            end = part.values_at + part.nbytes
            out = buffer[part.values_at : end]
            if isinstance(part.write, Gathered):
                gathered.append((out, part.write))
            else:
                part.write(out)
            if end % ALIGNMENT:
                buffer[end : align(end)] = bytes(align(end) - end)
        gather(gathered)
        if checksum:
            struct.pack_into("<Q", buffer, _CHECKSUM_AT, xxhash.xxh3_64_intdigest(buffer[ALIGNMENT:]))

    def _head(self, generation: int, flags: int) -> bytes:
        """Everything before the values."""
        counts = (len(self._parts), len(self._ids), self._directory_bytes, self.nbytes, generation)
        pieces = [_HEADER.pack(_MAGIC, 1, flags, *counts, 0).ljust(ALIGNMENT, b"\0")]
        for part in self._parts:
            places = (part.lengths_at, part.values_at, part.nbytes)
            pieces += (_COLUMN.pack(len(part.name), part.kind, part.dtype, part.ndim, *places), part.name)
        pieces.append(bytes(self._ids_at - ALIGNMENT - self._directory_bytes))
        for array in (self._ids, *[part.lengths for part in self._parts]):
            pieces.append(array.tobytes().ljust(align(array.nbytes), b"\0"))
        return b"".join(pieces)


def pack(rows: Sequence[SampleId], columns: Mapping[str, Sequence[Any] | Ragged]) -> PackedBlock:
    """The block of some rows. A column is a sequence of one value per row, one array whose rows are the values, or a
    Ragged, which is the fastest. ValueError if a column has another number of values, or a value cannot be carried."""
    named = Rows.of(rows)
    if named.has_repeats:
        raise ValueError(f"a row stands twice in a block: {list(rows)[:8]}")
    parts = []
    for name, values in columns.items():
        if len(values) != len(rows):
            raise ValueError(f"column {name!r} has {len(values)} values for {len(rows)} rows")
        try:
            parts.append(_pack_column(name.encode(), values))
        except ValueError as error:
            raise ValueError(f"column {name!r}: {error}") from error
    return PackedBlock(named.array, parts)


def _pack_column(name: bytes, values: Sequence[Any] | Ragged) -> _Part:
    if len(name) >= 1 << 16:
        raise ValueError("the name is too long")
    if isinstance(values, Ragged):
        return _pack_ragged(name, values)
    if isinstance(values, np.ndarray) and values.ndim > 1 and code_of(values.dtype) is not None:
        return _pack_even(name, values)
    kind = type(values[0]) if len(values) else None
    if kind is not None and (len(values) == 1 or len(set(map(type, values))) == 1):
        part = _pack_arrays(name, values) if kind in (np.ndarray, Bfloat16) else _pack_numbers(name, kind, values)
        if part is not None:
            return part
    packed = [pack_value(value) for value in values]
    lengths = np.array([len(data) for data in packed], dtype="<i8")
    joined = b"".join(packed)
    return _Part(name, _OBJECTS, 0, 0, lengths, len(joined), lambda out: out.__setitem__(slice(None), joined))


def _pack_arrays(name: bytes, values: Sequence[Any]) -> _Part | None:
    """A column of arrays; None unless they are of one dtype and number of dimensions."""
    is_bfloat16 = isinstance(values[0], Bfloat16)
    arrays = [value.bits for value in values] if is_bfloat16 else list(values)
    if len(set(map(_ndim_of, arrays))) > 1:
        return None
    dtypes = set(map(_dtype_of, arrays))
    codes = set(map(code_of, dtypes))
    code = codes.pop()
    if codes or code is None:
        return None
    code = BFLOAT16 if is_bfloat16 else code
    dtype, ndim = dtype_of(code), arrays[0].ndim
    if ndim == 1:
        shapes = sizes = np.fromiter(map(len, arrays), _INT64, len(arrays)).reshape(len(arrays), 1)
    else:
        shapes = np.array([array.shape for array in arrays], _INT64).reshape(len(arrays), ndim)
        sizes = np.prod(shapes, axis=1, dtype=_INT64, keepdims=True)
        arrays = [array.reshape(-1) for array in arrays]
    count = len(arrays[0]) if len(arrays) == 1 else int(sizes.sum())
    gathered = Gathered(arrays, dtype, dtypes == {dtype}, sizes)
    return _Part(name, _RAW, code, ndim, shapes, count * dtype.itemsize, gathered)


def _pack_numbers(name: bytes, kind: type, values: Sequence[Any]) -> _Part | None:
    """A column of single numbers; None unless `kind`, which all are of, is one of numpy's scalars or Python's numbers,
    and all of them fit into its dtype."""
    dtype = _number_dtype(kind)
    if dtype is None:
        return None
    try:
        numbers = np.array(values, dtype)
    except OverflowError:
        return None
    code = code_of(dtype)
    assert code is not None, dtype
    data = numbers.data.cast("B")

    def write(out: memoryview) -> None:
        out[:] = data

    return _Part(name, _NUMBERS if kind in _NUMBER_TYPES else _SCALARS, code, 0, np.empty(0, _INT64), len(data), write)


@lru_cache(maxsize=64)
def _number_dtype(kind: type) -> np.dtype | None:
    """How single numbers of a type are stored; None if they are not."""
    if issubclass(kind, np.generic) and code_of(np.dtype(kind)) is not None:
        return np.dtype(kind)
    return _NUMBER_TYPES.get(kind)


def _pack_even(name: bytes, values: np.ndarray) -> _Part:
    """A column that is one array: its rows are the values, all of one shape."""
    code = code_of(values.dtype)
    assert code is not None, values.dtype
    lengths = np.tile(np.array(values.shape[1:], "<i8"), (len(values), 1))

    def write(out: memoryview) -> None:
        np.copyto(np.frombuffer(out, dtype_of(code)).reshape(values.shape), values, casting="equiv")

    return _Part(name, _RAW, code, values.ndim - 1, lengths, values.size * dtype_of(code).itemsize, write)


def _pack_ragged(name: bytes, values: Ragged) -> _Part:
    """A column whose values lie one behind the other already."""
    code = BFLOAT16 if values.is_bfloat16 else code_of(values.values.dtype)
    sizes = np.prod(values.shapes, axis=1, dtype=np.int64)
    is_whole = values.values.ndim == 1 and int(values.ends[0]) == 0 and int(values.ends[-1]) == len(values.values)
    if code is None or not is_whole or not np.array_equal(np.diff(values.ends), sizes):
        raise ValueError(f"rows of {len(values.values)} items of {values.values.dtype} do not follow each other")

    def write(out: memoryview) -> None:
        np.copyto(np.frombuffer(out, dtype_of(code)), values.values, casting="equiv")

    lengths = values.shapes.astype("<i8", copy=False)
    return _Part(name, _RAW, code, lengths.shape[1], lengths, values.values.size * dtype_of(code).itemsize, write)


@dataclass(frozen=True, eq=False)
class Ragged:
    """The values of several rows one behind the other. values: [sum of the sizes]. ends: int64 [N + 1]: where in
    `values` each row starts, and where the last one ends. shapes: int64 [N, ndim] (of single numbers: [N, 0]).
    is_bfloat16: the values are bits."""

    values: np.ndarray
    ends: np.ndarray
    shapes: np.ndarray
    is_bfloat16: bool = False

    def __len__(self) -> int:
        return len(self.ends) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        """The value of a row, as a view (bfloat16: its bits)."""
        return self.values[int(self.ends[row]) : int(self.ends[row + 1])].reshape(self.shapes[row])

    @property
    def lengths(self) -> np.ndarray:
        """int64 [N]: how many items each row has."""
        return np.diff(self.ends)


class Column:
    """The values of one column, by row. values_at: where they start in the block."""

    def __init__(
        self, data: memoryview, kind: int, dtype: int, ends: np.ndarray, shapes: np.ndarray | None, values_at: int
    ) -> None:
        self._kind = kind
        self._dtype = dtype
        self._values: Any = data if kind == _OBJECTS else np.frombuffer(data, dtype_of(dtype))
        self._ends = ends
        self._shapes = shapes
        self._values_at = values_at

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, row: int) -> Any:
        """The value of a row: a read-only view of the block for arrays, else a new object."""
        if not 0 <= row < len(self):
            raise IndexError(row)
        if self._kind == _SCALARS:
            return self._values[row]
        if self._kind == _NUMBERS:
            return self._values.item(row)
        value = self._values[int(self._ends[row]) : int(self._ends[row + 1])]
        if self._shapes is None:
            assert isinstance(value, memoryview)
            return unpack_value(value)
        assert isinstance(value, np.ndarray)
        array = value.reshape(self._shapes[row])
        return Bfloat16(array) if self._dtype == BFLOAT16 else array

    def span(self, first: int, end: int) -> tuple[int, int]:
        """Where the values of the rows [first, end) lie in the block: (offset, number of bytes)."""
        itemsize = 1 if self._kind == _OBJECTS else dtype_of(self._dtype).itemsize
        start, stop = int(self._ends[first]), int(self._ends[end])
        return self._values_at + start * itemsize, (stop - start) * itemsize

    def piece(self, first: int, end: int) -> Ragged:
        """The values of the rows [first, end) where they lie. ValueError if they are no arrays (or numbers) of one
        dtype."""
        if self._shapes is None:
            raise ValueError("its values are not arrays of one dtype and number of dimensions")
        start = self._ends[first]
        values = self._values[int(start) : int(self._ends[end])]
        assert isinstance(values, np.ndarray)
        return Ragged(values, self._ends[first : end + 1] - start, self._shapes[first:end], self._dtype == BFLOAT16)


class Block:
    """A parsed block. Its columns are read where they lie; the memory must stay as it is while they are in use."""

    def __init__(self, data: memoryview, generation: int, ids: np.ndarray, columns: dict[str, Column]) -> None:
        self._data = data
        self.generation = generation
        self._ids = ids
        self._columns = columns

    @staticmethod
    def parse(data: memoryview | bytes | bytearray, *, verify: bool = False, head_only: bool = False) -> Block:
        """The block at the start of `data`. ValueError if it is malformed.

        verify: compare the checksum too, and refuse a block that has none. head_only: the values are not there yet, and
        their bytes are not looked at.
        """
        view = memoryview(data).cast("B").toreadonly()
        if len(view) < ALIGNMENT:
            raise ValueError(f"malformed block: {len(view)} bytes, shorter than a header")
        magic, version, flags, num_columns, num_rows, directory, total, generation, checksum = _HEADER.unpack_from(view)
        if magic != _MAGIC or version != 1:
            raise ValueError("malformed block: not the header of a block")
        if not ALIGNMENT <= total <= len(view):
            raise ValueError(f"malformed block: {total} bytes of which {len(view)} are there")
        view = view[:total]
        if verify:
            _verify(view, flags, checksum)
        ids_at = align(ALIGNMENT + directory)
        ids = _table(view, ids_at, num_rows * 3).reshape(num_rows, 3)
        columns = _parse_columns(view, ALIGNMENT, directory, num_columns, num_rows, check_values=not head_only)
        return Block(view, generation, ids, columns)

    @staticmethod
    def head_bytes(data: memoryview, nbytes: int) -> int:
        """How long the head of a block of `nbytes` bytes is, from its first bytes. ValueError if it is malformed."""
        if len(data) < ALIGNMENT:
            raise ValueError(f"malformed block: {len(data)} bytes, shorter than a header")
        magic, version, _, num_columns, num_rows, directory, _, _, _ = _HEADER.unpack_from(data)
        if magic != _MAGIC or version != 1:
            raise ValueError("malformed block: not the header of a block")
        length = align(align(ALIGNMENT + directory) + 24 * num_rows)
        if ALIGNMENT + directory > len(data):
            return min(nbytes, length)
        at = ALIGNMENT
        for _ in range(num_columns):
            if at + _COLUMN.size > ALIGNMENT + directory:
                raise ValueError("malformed block: the directory is cut off")
            name_bytes, kind, _, ndim, lengths_at, _, _ = _COLUMN.unpack_from(data, at)
            at += _COLUMN.size + name_bytes
            length = max(length, align(lengths_at + 8 * num_rows * (1 if kind == _OBJECTS else ndim)))
        if length > nbytes:
            raise ValueError(f"malformed block: a head of {length} bytes in a block of {nbytes}")
        return length

    @property
    def column_names(self) -> tuple[str, ...]:
        """The columns, in the order they were packed."""
        return tuple(self._columns)

    @cached_property
    def rows(self) -> list[SampleId]:
        """The identities of the rows."""
        return [SampleId(*row) for row in self._ids.tolist()]

    @cached_property
    def _row_of(self) -> dict[tuple[int, int], int]:
        return {(row[0], row[1]): index for index, row in enumerate(self.rows)}

    def row_of(self, group_id: int, sample_index: int) -> int:
        """Which row is that sample. KeyError if none is."""
        return self._row_of[group_id, sample_index]

    def runs_of(self, ids: np.ndarray) -> list[tuple[int, int]]:
        """Where rows lie, given their (group id, sample index) as int64 [n, 2], in that order: runs of neighbours, each
        [first, end). KeyError if one of them is not here."""
        own = self._ids[:, :2]
        starts = np.flatnonzero((own == ids[0]).all(axis=1))
        if len(starts) and np.array_equal(own[starts[0] : starts[0] + len(ids)], ids):
            return [(int(starts[0]), int(starts[0]) + len(ids))]
        places = np.array([self._row_of[group_id, index] for group_id, index in ids.tolist()])
        breaks = np.flatnonzero(np.diff(places) != 1) + 1
        return [(int(run[0]), int(run[-1]) + 1) for run in np.split(places, breaks)]

    def column(self, name: str) -> Column:
        """A column. KeyError if the block has none of that name."""
        return self._columns[name]


def _verify(view: memoryview, flags: int, checksum: int) -> None:
    if not flags & _HAS_CHECKSUM:
        raise ValueError("malformed block: it has no checksum")
    if xxhash.xxh3_64_intdigest(view[ALIGNMENT:]) != checksum:
        raise ValueError("malformed block: the checksum does not match")


def _section(view: memoryview, at: int, nbytes: int) -> memoryview:
    if at % ALIGNMENT or at < ALIGNMENT or at + nbytes > len(view):
        raise ValueError(f"malformed block: {nbytes} bytes at {at} of {len(view)}")
    return view[at : at + nbytes]


def _table(view: memoryview, at: int, count: int) -> np.ndarray:
    return np.frombuffer(_section(view, at, 8 * count), "<i8")


def _parse_columns(
    view: memoryview, at: int, nbytes: int, num_columns: int, num_rows: int, *, check_values: bool
) -> dict[str, Column]:
    end = at + nbytes
    if end > len(view) or nbytes < num_columns * _COLUMN.size:
        raise ValueError(f"malformed block: a directory of {nbytes} bytes for {num_columns} columns")
    columns: dict[str, Column] = {}
    for _ in range(num_columns):
        if at + _COLUMN.size > end:
            raise ValueError("malformed block: the directory is cut off")
        name_bytes, kind, dtype, ndim, lengths_at, values_at, values_bytes = _COLUMN.unpack_from(view, at)
        at += _COLUMN.size
        if at + name_bytes > end:
            raise ValueError("malformed block: a column's name is cut off")
        name = str(view[at : at + name_bytes], "utf-8")
        at += name_bytes
        if name in columns:
            raise ValueError(f"malformed block: column {name!r} stands twice")
        values = _section(view, values_at, values_bytes)
        if kind in (_RAW, _SCALARS, _NUMBERS):
            if kind != _RAW:
                _check_numbers(name, kind, dtype, ndim)
            columns[name] = _parse_raw(view, name, kind, dtype, ndim, lengths_at, values, values_at, num_rows)
            if check_values and dtype_of(dtype) == np.bool_:
                check_bools(name, values)
        elif kind == _OBJECTS:
            sizes = _table(view, lengths_at, num_rows)
            columns[name] = Column(values, kind, 0, _ends(name, sizes, values_bytes, 1), None, values_at)
        else:
            raise ValueError(f"malformed block: column {name!r} is of an unknown kind {kind}")
    return columns


def _check_numbers(name: str, kind: int, dtype: int, ndim: int) -> None:
    is_known = dtype != BFLOAT16 and (kind == _SCALARS or dtype_of(dtype) in _NUMBER_TYPES.values())
    if ndim or not is_known:
        raise ValueError(f"malformed block: column {name!r} has numbers of {ndim} dimensions and dtype {dtype}")


def _parse_raw(
    view: memoryview,
    name: str,
    kind: int,
    dtype: int,
    ndim: int,
    lengths_at: int,
    values: memoryview,
    values_at: int,
    num_rows: int,
) -> Column:
    if ndim > _MAX_NDIM:
        raise ValueError(f"malformed block: column {name!r} has {ndim} dimensions")
    shapes = _table(view, lengths_at, num_rows * ndim).reshape(num_rows, ndim)
    if ndim == 1:
        sizes = shapes[:, 0]
    else:
        if shapes.size and int(shapes.min()) < 0:
            raise ValueError(f"malformed block: column {name!r} has a negative length")
        # Products in float64 first: those in int64 could wrap around. A 0 makes a product 0 whatever else is there.
        rough = np.prod(np.maximum(shapes, 1), axis=1, dtype=np.float64)
        if rough.size and float(rough.max()) >= 2.0**60:
            raise ValueError(f"malformed block: column {name!r} has a value of impossible size")
        sizes = np.prod(shapes, axis=1, dtype=np.int64)
    ends = _ends(name, sizes, len(values), dtype_of(dtype).itemsize)
    return Column(values, kind, dtype, ends, shapes, values_at)


def check_bools(name: str, values: memoryview) -> None:
    """ValueError if the bytes of a column of bools hold something else."""
    if len(values) and int(np.frombuffer(values, np.uint8).max()) > 1:
        raise ValueError(f"malformed block: column {name!r} has a bool that is neither 0 nor 1")


def _ends(name: str, sizes: np.ndarray, nbytes: int, itemsize: int) -> np.ndarray:
    """int64 [N + 1]: where each value starts, and where the last one ends, in items. Checks that they fill nbytes."""
    if len(sizes) == 1 and 0 <= (size := int(sizes[0])) * itemsize == nbytes:
        return np.array([0, size], np.int64)
    if sizes.size and (int(sizes.min()) < 0 or int(sizes.max()) > nbytes):
        raise ValueError(f"malformed block: column {name!r} has a value longer than the column")
    ends = np.zeros(len(sizes) + 1, dtype=np.int64)
    # Each size is at most nbytes, and there are at most nbytes / 8 of them: the sum cannot wrap around.
    np.cumsum(sizes, out=ends[1:])
    if int(ends[-1]) * itemsize != nbytes:
        raise ValueError(f"malformed block: column {name!r} has {nbytes} bytes for {int(ends[-1])} items")
    return ends
