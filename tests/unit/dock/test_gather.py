"""Arrays of rows arrive in their columns, whichever way they lie in memory and whichever order they are copied in."""

from __future__ import annotations

import logging
import os
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tranship.dock import gather as module
from tranship.dock.block import Block, pack
from tranship.dock.gather import Gathered, gather
from tranship.dock.values import Bfloat16
from tranship.models.cache import cache_root
from tranship.models.compiled import compiled
from tranship.types import SampleId, UserError

DTYPES = ["<i4", "<i8", "<f4", "<f2", "<u2", "|b1", ">i4"]


def written(rows, columns):
    block = pack(rows, columns)
    data = bytearray(block.nbytes)
    block.write_into(memoryview(data), checksum=True)
    return data


def packed(rows, columns):
    return Block.parse(written(rows, columns), verify=True)


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


@pytest.fixture
def compiled_loop(monkeypatch):
    """Every block counts as large, and as several pieces."""
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("there is no C++ compiler: install g++, or set CXX")
    # Sources that cannot be built are a failure, not a reason to skip.
    assert module._loop() is not None
    monkeypatch.setattr(module, "_LARGE_BYTES", 0)
    monkeypatch.setattr(module, "_PIECE_BYTES", 8000)


@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loop", ["python", "compiled"])
def test_every_array_arrives(dtype, by_row, loop, monkeypatch, request):
    if loop == "compiled":
        request.getfixturevalue("compiled_loop")
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
        columns.append(Gathered(arrays, np.dtype(dtype), True, np.array(lengths).reshape(-1, 1)))
    outs = [memoryview(bytearray(4 * sum(lengths))) for _ in columns]
    if by_row:
        assert module._gather_by_row(list(zip(outs, columns, strict=True)))
    else:
        gather(list(zip(outs, columns, strict=True)))
    for out, column in zip(outs, columns, strict=True):
        assert bytes(out) == np.concatenate(column.arrays).tobytes()


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=30), st.booleans(), st.integers(0, 7), st.sampled_from([1, 4, 8])
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_compiled_loop_writes_what_lies_in_the_arrays_and_nothing_beside_them(
    compiled_loop, lengths, by_row, start, itemsize
):
    rng = np.random.default_rng(len(lengths))
    dtype = np.dtype({1: "u1", 4: "<i4", 8: "<f8"}[itemsize])
    columns, room, at = [], np.full(128 + 3 * (itemsize * sum(lengths) + 64), 7, np.uint8), start * itemsize
    spans = []
    for _ in range(3):
        # Anywhere in its memory, as a view of a larger array lies.
        arrays = [rng.integers(0, 256, itemsize * (n + 2), np.uint8)[itemsize : itemsize * (n + 1)] for n in lengths]
        columns.append(Gathered([one.view(dtype) for one in arrays], dtype, True, np.array(lengths).reshape(-1, 1)))
        spans.append((at, at + itemsize * sum(lengths)))
        at = spans[-1][1] + 1
    outs = [memoryview(room)[first:end] for first, end in spans]
    assert module._gather_compiled(list(zip(outs, columns, strict=True)), by_row=by_row)
    for (first, end), column in zip(spans, columns, strict=True):
        assert room[first:end].tobytes() == b"".join(one.tobytes() for one in column.arrays)
        room[first:end] = 7
    assert (room == 7).all()


def test_the_compiled_loop_leaves_arrays_that_it_cannot_copy_to_others(compiled_loop):
    room = memoryview(bytearray(80))
    lengths = np.array([[5], [5]])
    whole = np.arange(5, dtype=np.int64)
    for arrays, as_stored in (
        ([whole, np.arange(10)[::2]], True),
        ([whole, np.arange(4)], True),
        ([whole, whole.astype(">i8")], False),
        ([whole, None], True),
    ):
        column = Gathered(arrays, np.dtype(np.int64), as_stored, lengths)
        assert not module._gather_compiled([(room, column)], by_row=False)


def test_pieces_are_of_about_the_same_size_and_a_long_row_is_left_to_others(compiled_loop):
    sizes = 8 * np.array([10, 200, 0, 0, 240, 1, 1, 240, 3])
    arrays = [np.ones(n, np.float32) for n in sizes]
    column = Gathered(arrays, np.dtype(np.float32), True, sizes.reshape(-1, 1))
    room = memoryview(bytearray(int(sizes.sum()) * 4))
    ends = module._pieces([(room, column)])
    assert ends == [0, 4, 7, 9]
    pieces = [4 * int(sizes[first:end].sum()) for first, end in pairwise(ends)]
    assert max(pieces) <= 2 * module._PIECE_BYTES
    assert module._gather_compiled([(room, column)], by_row=False)
    sizes[3] = 2001
    assert module._pieces([(room, column)]) is None


@pytest.mark.parametrize("cache", ["~nobody-of-that-name/cache", ""])
def test_without_a_folder_for_the_cache_python_copies(monkeypatch, tmp_path, cache):
    columns = made(["<f8", "<f4"], 8, 2000, by_row=True)
    wanted = bytes(written([SampleId(i, 0) for i in range(8)], columns))
    monkeypatch.setattr(module, "_LARGE_BYTES", 0)
    monkeypatch.setenv("TRANSHIP_CACHE", cache)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if not cache:

        def no_home():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", no_home)
    module._loop.cache_clear()
    try:
        assert bytes(written([SampleId(i, 0) for i in range(8)], columns)) == wanted
        assert module._loop() is None
        with pytest.raises(UserError, match="Set TRANSHIP_CACHE to one that can be written"):
            cache_root()
    finally:
        module._loop.cache_clear()


@pytest.mark.parametrize(("compiler", "said"), [("true", "it made nothing"), ("not a program", "cannot be run")])
def test_a_compiler_that_makes_nothing_is_named_and_leaves_nothing(monkeypatch, tmp_path, compiler, said):
    path = tmp_path / "compiler"
    path.write_text("#!/bin/sh\nexit 0\n" if compiler == "true" else "no program")
    path.chmod(0o755)
    monkeypatch.setenv("TRANSHIP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(path))
    with pytest.raises(UserError, match=said):
        compiled(module._SOURCES)
    assert not [one for one in (tmp_path / "cache" / "kernels").iterdir() if one.is_dir()]


def test_without_a_compiler_python_copies(monkeypatch, tmp_path, caplog):
    columns = made(["<f8", "<f4"], 8, 2000, by_row=True)
    wanted = bytes(written([SampleId(i, 0) for i in range(8)], columns))
    monkeypatch.setattr(module, "_LARGE_BYTES", 0)
    monkeypatch.setenv("TRANSHIP_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    module._loop.cache_clear()
    try:
        with caplog.at_level(logging.INFO):
            assert bytes(written([SampleId(i, 0) for i in range(8)], columns)) == wanted
    finally:
        module._loop.cache_clear()
    assert "without its compiled loop, slower: there is no C++ compiler 'no-such-compiler'" in caplog.text


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
