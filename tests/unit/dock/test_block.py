import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tranship.dock.block import ALIGNMENT, Block, pack
from tranship.dock.values import DTYPE_NAMES, Bfloat16, unpack_value
from tranship.types import SampleId


def rows(count: int) -> list[SampleId]:
    return [SampleId(7, index) for index in range(count)]


def written(columns: dict, count: int, **options) -> bytearray:
    packed = pack(rows(count), columns)
    buffer = bytearray(packed.nbytes)
    packed.write_into(memoryview(buffer), **options)
    return buffer


def round_trip(values: list) -> list:
    column = Block.parse(written({"c": values}, len(values))).column("c")
    return [column[index] for index in range(len(column))]


def same(a, b) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, Bfloat16):
        return same(a.bits, b.bits)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, np.generic):
        return a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return np.float64(a).tobytes() == np.float64(b).tobytes()
    return a == b


@pytest.mark.parametrize(
    "values",
    [
        [None, "text", {"a": 1}, True, 2**53 + 1],
        [-(2**63), 2**64 - 1, 0],
        [1.5, float("inf"), -0.0],
        [[1, [2, {"k": None}]], [], {}],
        [(1, "a"), ((), [()]), {"t": (1,)}],
        [{3: "int key", "s": b"\x00\xff"}],
        [np.ones((3, 3), np.float32), np.ones((3, 4), np.float32)],
        [np.empty(0, np.int32), np.arange(3, dtype=np.int32)],
        [np.empty((0, 5)), np.empty((4, 0)), np.ones((2, 3))],
        [np.array(3.5), np.array(-1.0)],
        [Bfloat16(np.array([[1, 65535]], np.uint16)), Bfloat16(np.empty((0, 2), np.uint16))],
        [np.arange(2, dtype=np.int64), None],
        [np.arange(2, dtype=np.int64), np.arange(2, dtype=np.int32)],
        [np.ones(2), np.ones((2, 2))],
        [np.float32(0.1), np.int64(2**60), np.bool_(True)],
        [np.float32(0.1), np.float32("nan"), np.float32(-0.0)],
        [np.bool_(True), np.bool_(False)],
        [np.uint64(2**64 - 1)],
        [0, -(2**63), 2**63 - 1],
        [0, 2**63],
        [True, False],
        [True, 1],
        [1.0, 1],
        [{"nested": np.arange(6, dtype=np.uint8).reshape(2, 3), "b": Bfloat16(np.zeros(2, np.uint16))}],
        ["\ud800 lone surrogate"],
    ],
    ids=str,
)
def test_values_come_back_equal_and_in_the_same_type(values):
    assert all(same(a, b) for a, b in zip(values, round_trip(values), strict=True))


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_each_dtype_comes_back(dtype):
    values = [np.array([0, 1], dtype=dtype), np.array([1], dtype=dtype)]
    assert all(same(a, b) for a, b in zip(values, round_trip(values), strict=True))


def test_either_byte_order_and_any_strides_come_back_as_numbers():
    values = [np.arange(4, dtype=">i4"), np.arange(12, dtype=np.int32)[::3], np.arange(4, dtype=np.int32)[::-1]]
    back = round_trip(values)
    assert [value.tolist() for value in back] == [[0, 1, 2, 3], [0, 3, 6, 9], [3, 2, 1, 0]]
    assert all(value.dtype == np.dtype("<i4") for value in back)


def test_bfloat16_is_the_upper_half_of_float32():
    number = Bfloat16(np.array([0x3F80, 0xC000], np.uint16))
    assert number.to_float32().tolist() == [1.0, -2.0]
    assert number != Bfloat16(np.array([0x3F80], np.uint16))


def test_identities_come_back_and_find_their_row():
    ids = [SampleId(5, -1), SampleId(5, 0, 2), SampleId(2**40, 3)]
    packed = pack(ids, {"c": [1, 2, 3]})
    buffer = bytearray(packed.nbytes)
    packed.write_into(memoryview(buffer), generation=9)
    block = Block.parse(buffer)
    assert block.rows == ids
    assert block.generation == 9
    assert [block.row_of(5, -1), block.row_of(5, 0), block.row_of(2**40, 3)] == [0, 1, 2]
    with pytest.raises(KeyError):
        block.row_of(5, 1)


def test_arrays_are_views_of_the_block_and_cannot_be_written():
    buffer = written({"c": [np.arange(3, dtype=np.int32)]}, 1)
    value = Block.parse(buffer).column("c")[0]
    with pytest.raises(ValueError, match="read-only"):
        value[0] = 9
    with pytest.raises(ValueError):
        value.flags.writeable = True
    assert np.shares_memory(value, np.frombuffer(buffer, np.uint8))


def test_values_of_a_column_start_aligned():
    buffer = written({"odd": ["x"], "c": [np.arange(3, dtype=np.float32)], "d": [np.ones(1, bool)]}, 1)
    base = np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]
    block = Block.parse(buffer)
    for name in ("c", "d"):
        assert (block.column(name)[0].__array_interface__["data"][0] - base) % ALIGNMENT == 0


def test_the_checksum_notices_a_flipped_byte():
    buffer = written({"c": [np.arange(100)]}, 1, checksum=True)
    Block.parse(buffer, verify=True)
    buffer[-100] ^= 1
    with pytest.raises(ValueError, match="checksum"):
        Block.parse(buffer, verify=True)
    with pytest.raises(ValueError, match="no checksum"):
        Block.parse(written({"c": [1]}, 1), verify=True)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"c": [1]}, "has 1 values for 2 rows"),
        ({"c": [1, object()]}, "column 'c': a value cannot be carried: builtins.object"),
        ({"c": [1, 2**64]}, "column 'c': a value cannot be carried"),
        ({"c": [1, {1, 2}]}, "builtins.set"),
        ({"c": [np.array(["a"]), 1]}, "dtype <U1"),
        ({"c": [np.array([None]), np.array([None])]}, "dtype object"),
    ],
)
def test_what_cannot_be_carried_is_named(columns, message):
    with pytest.raises(ValueError, match=message):
        pack(rows(2), columns)


def test_a_value_nested_too_deep_is_refused():
    value: list = []
    for _ in range(5000):
        value = [value]
    with pytest.raises(ValueError, match="column 'c'"):
        pack(rows(1), {"c": [value]})


def test_a_row_that_stands_twice_is_refused():
    with pytest.raises(ValueError, match="twice"):
        pack([SampleId(1, 0), SampleId(1, 0)], {"c": [1, 2]})


def test_a_block_without_rows_or_columns_is_one():
    assert Block.parse(written({}, 0)).rows == []
    assert len(Block.parse(written({"c": []}, 0)).column("c")) == 0


arrays = st.builds(
    lambda dtype, shape, seed: np.random.default_rng(seed).integers(0, 2, shape).astype(dtype),
    st.sampled_from(DTYPE_NAMES),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.integers(0, 1000),
)
scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary()
)
values = st.recursive(
    scalars | arrays | arrays.map(lambda a: Bfloat16(a.astype(np.uint16))),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers(-5, 5), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_columns_come_back(data):
    count = data.draw(st.integers(0, 5))
    uniform = st.sampled_from(DTYPE_NAMES).flatmap(
        lambda dtype: st.lists(arrays.map(lambda a: a.astype(dtype)), min_size=count, max_size=count)
    )
    column = st.lists(values, min_size=count, max_size=count) | uniform
    columns = data.draw(st.dictionaries(st.text(max_size=8), column, max_size=3))
    block = Block.parse(written(columns, count))
    assert block.column_names == tuple(columns)
    for name, wanted in columns.items():
        column = block.column(name)
        assert all(same(value, column[index]) for index, value in enumerate(wanted))


def read_all(data: bytes | bytearray) -> None:
    """Everything a reader could touch; ValueError is the only error that may come out."""
    try:
        block = Block.parse(data)
        assert len(block.rows) <= len(data)
        for name in block.column_names:
            column = block.column(name)
            for index in range(len(column)):
                column[index]
    except ValueError:
        pass


SEED_BLOCK = bytes(
    written(
        {
            "ids": [np.arange(5, dtype=np.int32), np.arange(2, dtype=np.int32)],
            "grid": [np.ones((2, 3)), np.ones((1, 3))],
            "mask": [np.ones(3, bool), np.ones(1, bool)],
            "objects": [{"a": (1, np.arange(2))}, [np.float32(1), "text", Bfloat16(np.zeros(1, np.uint16))]],
        },
        2,
    )
)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(SEED_BLOCK) - 1), st.integers(0, 255)), min_size=1, max_size=8),
    st.integers(0, len(SEED_BLOCK)),
)
def test_a_damaged_block_is_refused_or_read_and_nothing_else(flips, cut):
    damaged = bytearray(SEED_BLOCK)
    for at, byte in flips:
        damaged[at] = byte
    read_all(damaged)
    read_all(damaged[:cut])


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(SEED_BLOCK) // 8 - 1), st.sampled_from([0, 1, 2**31, 2**32, 2**62, 2**63 - 1, 2**64 - 1]))
def test_extreme_numbers_in_a_block_take_no_memory(place, number):
    damaged = bytearray(SEED_BLOCK)
    damaged[8 * place : 8 * place + 8] = number.to_bytes(8, "little")
    read_all(damaged)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_no_block(noise):
    read_all(noise)
    read_all(SEED_BLOCK[:64] + noise)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40))
def test_noise_as_a_value_is_a_value_error_at_most(noise):
    try:
        unpack_value(noise)
    except ValueError:
        pass
