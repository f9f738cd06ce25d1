"""Arrays of rows arrive in their columns, whichever way they lie in memory and whichever order they are copied in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tranship.dock import gather as module
from tranship.dock.block import Block, pack
from tranship.dock.gather import Gathered, gather
from tranship.dock.values import Bfloat16
from tranship.types import SampleId

DTYPES = ["<i4", "<i8", "<f4", "<f2", "<u2", "|b1", ">i4"]


def packed(rows, columns):
    block = pack(rows, columns)
    data = bytearray(block.nbytes)
    block.write_into(memoryview(data), checksum=True)
    return Block.parse(data, verify=True)


def made(dtypes, count, longest, *, by_row, stride=1):
    """Columns of random arrays that are views of one memory, row by row or column by column."""
    rng = np.random.default_rng(0)
    names = [f"c{i}" for i in range(len(dtypes))]
    lengths = {name: rng.integers(0, longest + 1, count) for name in names}
    order = [(i, name) for i in range(count) for name in names]
    arena, at = np.zeros(count * len(names) * (longest + 1) * 8 * stride, np.uint8), 0
    columns = {name: [None] * count for name in names}
    for i, name in order if by_row else sorted(order, key=lambda one: one[1]):
        dtype = np.dtype(dtypes[names.index(name)])
        nbytes = int(lengths[name][i]) * stride * dtype.itemsize
        array = arena[at : at + nbytes].view(dtype)[::stride]
        array[...] = rng.integers(0, 2, len(array))
        columns[name][i] = array
        at += nbytes
    return columns


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_array_arrives(dtype, by_row, monkeypatch):
    monkeypatch.setattr(module, "_WORTH_BYTES", 0)
    rows = [SampleId(i, 0) for i in range(20)]
    for stride in (1, 2):
        columns = made([dtype, "<f4", dtype], 20, 30, by_row=by_row, stride=stride)
        block = packed(rows, columns)
        for name, values in columns.items():
            for i, value in enumerate(values):
                found = block.column(name)[i]
                assert found.dtype == value.dtype.newbyteorder("<")
                np.testing.assert_array_equal(found, value)


@given(st.lists(st.integers(0, 40), min_size=2, max_size=20), st.booleans())
def test_both_orders_write_the_same_bytes(lengths, by_row):
    columns = []
    for dtype in (np.int32, np.float32):
        arrays = [np.arange(n, dtype=dtype) * (i + 1) for i, n in enumerate(lengths)]
        columns.append(Gathered(arrays, np.dtype(dtype), np.array(lengths).reshape(-1, 1)))
    outs = [memoryview(bytearray(4 * sum(lengths))) for _ in columns]
    if by_row:
        assert module._gather_by_row(list(zip(outs, columns, strict=True)))
    else:
        gather(list(zip(outs, columns, strict=True)))
    for out, column in zip(outs, columns, strict=True):
        assert bytes(out) == np.concatenate(column.arrays).tobytes()


def test_rows_that_lie_beside_each_other_are_copied_row_by_row():
    rows = [SampleId(i, 0) for i in range(8)]
    for by_row in (True, False):
        columns = made(["<f8", "<f8"], 8, 2000, by_row=by_row)
        parts = [(memoryview(bytearray(part.nbytes)), part.write) for part in pack(rows, columns)._parts]
        assert module._is_by_row(parts) == by_row
        assert not module._is_by_row(parts[:1])


def test_bits_of_bfloat16_are_copied_row_by_row_too(monkeypatch):
    monkeypatch.setattr(module, "_WORTH_BYTES", 0)
    columns = made(["<u2", "<f4"], 4, 30, by_row=True)
    bits = columns["c0"]
    columns["c0"] = [Bfloat16(one) for one in bits]
    block = packed([SampleId(0, i) for i in range(4)], columns)
    for i, one in enumerate(bits):
        np.testing.assert_array_equal(block.column("c0")[i].bits, one)
