"""Whole columns at once are what they are row by row, however rows lie in blocks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tranship.dock import Bfloat16, Buffers, Dock, DockClient, Ragged, StageNeeds
from tranship.types import SampleId

STAGES = (
    StageNeeds("read", ("prompt", "tokens", "matrix", "score", "mask")),
    StageNeeds("rows", ("tokens",), "row"),
)


def make(slab_bytes=1 << 16):
    dock = Dock(
        STAGES,
        run_id="batch",
        batch_groups=1,
        staleness=0,
        lease_s=10,
        slab_bytes=slab_bytes,
        capacity_bytes=1 << 24,
        shared=False,
        ordered=False,
    )
    client = DockClient(lambda method, *args, **kwargs: getattr(dock, method)(*args, **kwargs), "me", wait_s=0)
    return dock, client


def values(row: SampleId) -> dict[str, np.ndarray]:
    seed = row.group_id * 10 + row.sample_index
    return {
        "tokens": np.arange(seed % 7, dtype=np.int32) + seed,
        "matrix": np.full((seed % 3, 2), seed, np.float32),
        "score": np.array(seed, np.float64),
        "mask": np.arange(seed % 5) % 2 == 0,
    }


def put(client, rows, names=("tokens", "matrix", "score", "mask")):
    made = [values(row) for row in rows]
    client.put(rows, {name: [one[name] for one in made] for name in names})


def prompt(group_id: int) -> np.ndarray:
    return np.arange(group_id % 4, dtype=np.int32)


@st.composite
def puts(draw):
    """Groups of some size, and their rows in pieces, in any order."""
    num_groups, size = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    rows = [SampleId(group, index) for group in range(num_groups) for index in range(size)]
    if draw(st.booleans()):
        rows = draw(st.permutations(rows))
    cuts = sorted(draw(st.sets(st.integers(1, len(rows)), max_size=4)) | {0, len(rows)})
    return num_groups, size, [list(rows[a:b]) for a, b in pairwise(cuts)]


@settings(max_examples=60, deadline=None)
@given(puts(), st.booleans())
def test_packed_and_viewed_columns_are_those_of_the_rows(history, columns_apart):
    num_groups, size, pieces = history
    dock, client = make()
    client.admit([(group, size, "val", {"prompt": prompt(group)}) for group in range(num_groups)])
    for piece in pieces:
        if columns_apart:
            put(client, piece, ("score", "mask"))
            put(client, piece, ("tokens", "matrix"))
        else:
            put(client, piece)
    batch = client.take("read", max_groups=num_groups, kinds=("val",))
    assert batch is not None
    assert len(batch) == num_groups * size
    packed = batch.packed(("tokens", "matrix", "score", "mask", "prompt"), Buffers())
    for place, row in enumerate(batch.ids):
        for name, wanted in values(row).items():
            np.testing.assert_array_equal(packed[name][place], wanted)
            np.testing.assert_array_equal(batch[name][place], wanted)
            assert packed[name][place].dtype == wanted.dtype
    for place, group in enumerate(batch.groups):
        np.testing.assert_array_equal(packed["prompt"][place], prompt(group.group_id))
    assert packed["tokens"].lengths.tolist() == [len(values(row)["tokens"]) for row in batch.ids]
    seen = [view[place] for view in batch.views("tokens") for place in range(len(view))]
    for value, row in zip(seen, batch.ids, strict=True):
        np.testing.assert_array_equal(value, values(row)["tokens"])
    dock.close()


def test_kept_memory_is_used_again_and_nothing_of_the_old_batch_shows():
    dock, client = make()
    buffers, seen = Buffers(), []
    for step in range(4):
        client.admit([(step, 2, "val", {"prompt": prompt(step)})])
        put(client, [SampleId(step, 0), SampleId(step, 1)])
        batch = client.take("read", max_groups=1, kinds=("val",))
        assert batch is not None
        packed = batch.packed(("tokens",), buffers)["tokens"]
        assert [packed[i].tolist() for i in (0, 1)] == [values(row)["tokens"].tolist() for row in batch.ids]
        seen.append((packed.values.__array_interface__["data"][0], buffers.nbytes))
        client.ack(batch.lease)
    assert len(set(seen)) == 1
    dock.close()


def test_views_cannot_be_written_and_packed_columns_can():
    dock, client = make()
    client.admit([(1, 1, "val", {"prompt": prompt(1)})])
    put(client, [SampleId(1, 0)])
    batch = client.take("read", max_groups=1, kinds=("val",))
    assert batch is not None
    with pytest.raises(ValueError, match="read-only"):
        batch.views("tokens")[0].values[0] = 1
    batch.packed(("tokens",), Buffers())["tokens"].values[0] = 1
    dock.close()


def test_columns_that_cannot_be_packed_say_so():
    dock, client = make()
    client.admit([(1, 2, "val", {"prompt": prompt(1)})])
    client.put([SampleId(1, 0), SampleId(1, 1)], {"tokens": [np.zeros(2), None]})
    batch = client.take_rows("rows", max_rows=2)
    assert batch is not None
    with pytest.raises(ValueError, match="'tokens' cannot be packed"):
        batch.packed(("tokens",), Buffers())
    with pytest.raises(KeyError, match="does not read column 'matrix'"):
        batch.packed(("matrix",), Buffers())
    client.release(batch.lease)
    dock.close()


def test_rows_of_several_dtypes_cannot_be_packed():
    dock, client = make()
    client.admit([(1, 2, "val", {"prompt": prompt(1)})])
    client.put([SampleId(1, 0)], {"tokens": [np.zeros(2, np.int32)]})
    client.put([SampleId(1, 1)], {"tokens": [np.zeros(2, np.int64)]})
    batch = client.take_rows("rows", max_rows=2)
    assert batch is not None
    with pytest.raises(ValueError, match="several dtypes"):
        batch.packed(("tokens",), Buffers())
    dock.close()


def test_bfloat16_and_one_array_as_a_column():
    dock, client = make()
    client.admit([(1, 2, "val", {"prompt": prompt(1)}), (2, 2, "val", {"prompt": prompt(2)})])
    bits = [Bfloat16(np.array([1, 2], np.uint16)), Bfloat16(np.array([3], np.uint16))]
    client.put([SampleId(1, 0), SampleId(1, 1)], {"tokens": bits})
    client.put([SampleId(2, 0), SampleId(2, 1)], {"tokens": np.array([[1, 2], [3, 4]], ">i4")})
    for wanted, is_bfloat16 in (([[1, 2], [3]], True), ([[1, 2], [3, 4]], False)):
        batch = client.take_rows("rows", max_rows=2)
        assert batch is not None
        packed = batch.packed(("tokens",), Buffers())["tokens"]
        assert [packed[i].tolist() for i in (0, 1)] == wanted
        assert packed.is_bfloat16 == is_bfloat16
        client.ack(batch.lease)
    dock.close()


def test_routing_replay_of_a_mixture_of_experts_comes_back():
    """A wide column of realistic shape: 48 layers, the best 8 of 128 experts, for each token of 16 responses."""
    dock, client = make(slab_bytes=1 << 20)
    lengths = [int(n) for n in np.random.default_rng(0).integers(20, 200, 16)]
    routing = [np.random.default_rng(n).integers(0, 128, (n, 48, 8), dtype=np.uint8) for n in lengths]
    client.admit([(group, 8, "val", {"prompt": prompt(1)}) for group in (0, 1)])
    client.put([SampleId(i // 8, i % 8) for i in range(16)], {"tokens": routing})
    batch = client.take_rows("rows", max_rows=16)
    assert batch is not None
    packed = batch.packed(("tokens",), Buffers())["tokens"]
    assert packed.values.nbytes == sum(lengths) * 48 * 8
    for place, wanted in enumerate(routing):
        np.testing.assert_array_equal(packed[place], wanted)
    dock.close()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.booleans())
def test_what_was_read_packed_can_be_put_as_it_is(lengths, is_bfloat16):
    dock, client = make()
    rows = [SampleId(0, index) for index in range(len(lengths))]
    client.admit([(0, len(rows), "val", {"prompt": prompt(1)}), (1, len(rows), "val", {"prompt": prompt(1)})])
    arrays = [np.arange(2 * length, dtype=np.uint16).reshape(length, 2) for length in lengths]
    client.put(rows, {"tokens": [Bfloat16(array) for array in arrays] if is_bfloat16 else arrays})
    batch = client.take_rows("rows", max_rows=len(rows))
    assert batch is not None
    packed = batch.packed(("tokens",), Buffers())["tokens"]
    client.put([SampleId(1, row.sample_index) for row in rows], {"tokens": packed})
    again = client.take_rows("rows", max_rows=len(rows))
    assert again is not None
    for value, array in zip(again["tokens"], arrays, strict=True):
        np.testing.assert_array_equal(value.bits if is_bfloat16 else value, array)
    dock.close()


@pytest.mark.parametrize(
    ("ends", "shapes"),
    [([0, 2], [[2]]), ([1, 4], [[3]]), ([0, 1, 4], [[2], [2]]), ([0, 4], [[2]])],
)
def test_rows_that_do_not_follow_each_other_are_refused(ends, shapes):
    dock, client = make()
    size = len(shapes)
    client.admit([(0, size, "val", {"prompt": prompt(1)})])
    ragged = Ragged(np.arange(4), np.array(ends), np.array(shapes))
    with pytest.raises(ValueError, match="do not follow each other"):
        client.put([SampleId(0, index) for index in range(size)], {"tokens": ragged})
    dock.close()
