"""Columns of realistic width and more than one dimension: what was put comes out, in every way to read it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tranship.bench.dock_wide import KINDS, make
from tranship.dock import Batch, Buffers, Dock, DockClient, StageNeeds
from tranship.dock.block import Block, Ragged, pack
from tranship.dock.served import ServedDock
from tranship.types import SampleId

SIZE, LENGTH = 2, 1024


@dataclass
class Ends:
    writer: DockClient
    near: DockClient
    far: DockClient


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    """Clients of a dock: one that writes, one on its node that reads, and one that reads as from another node."""
    stages = [StageNeeds(f"{kind}-{who}", columns) for kind, columns in KINDS.items() for who in ("near", "far")]

    def make_dock(clock, adopt):
        return Dock(
            [*stages, StageNeeds("own", ("image",))],
            run_id="wide",
            batch_groups=1,
            staleness=0,
            lease_s=60.0,
            slab_bytes=1 << 20,
            capacity_bytes=32 << 20,
            shared=True,
            ordered=False,
            clock=clock,
            adopt=adopt,
            root=tmp_path,
        )

    served = ServedDock(make_dock, [f"unix:{tmp_path / 's'}", "tcp:127.0.0.1:0"], runs="tcp:127.0.0.1:0")
    unix, tcp = served.addresses
    writer, near = (DockClient.connect(unix, served.secret, name, wait_s=5.0) for name in ("writer", "near"))
    far = DockClient.connect(tcp, served.secret, "far", wait_s=5.0, node="elsewhere")
    yield Ends(writer, near, far)
    for client in (writer, near, far):
        client.close()
    served.close()


def take(client: DockClient, stage: str) -> Batch:
    batch = client.take(stage, max_groups=9, kinds=("val",), wait_s=5.0)
    assert batch is not None
    return batch


def check(values: list[np.ndarray], found) -> None:
    assert len(found) == len(values)
    for value, one in zip(values, found, strict=True):
        assert one.dtype == value.dtype
        assert one.shape == value.shape
        assert np.array_equal(one, value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wide_column_comes_out_as_it_was_put(ends: Ends, kind: str) -> None:
    columns = make(kind, SIZE, LENGTH)
    ends.writer.admit([(7, SIZE, "val", {})])
    ends.writer.put([SampleId(7, index) for index in range(SIZE)], columns)
    near, far = take(ends.near, f"{kind}-near"), take(ends.far, f"{kind}-far")
    packed = far.packed(tuple(columns), Buffers())
    for name, values in columns.items():
        check(values, near[name])
        check(values, packed[name])
        (piece,) = near.views(name)
        check(values, piece)
        assert piece.shapes.tolist() == [list(value.shape) for value in values]
        assert not piece.values.flags.writeable
    ends.near.ack(near.lease)
    ends.far.ack(far.lease)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_read_is_put_again_without_being_taken_apart(ends: Ends, kind: str) -> None:
    """Packed columns, whole batches of them, are values to put: the tail of each row's shape is kept."""
    columns = make(kind, SIZE, LENGTH)
    rows = [SampleId(1, index) for index in range(SIZE)]
    block = Block.parse(_bytes(pack(rows, columns)))
    pieces = {name: block.column(name).piece(0, SIZE) for name in columns}
    assert all(isinstance(piece, Ragged) and piece.shapes.shape[1] > 1 for piece in pieces.values())
    again = Block.parse(_bytes(pack(rows, pieces)))
    for name, values in columns.items():
        check(values, [again.column(name)[row] for row in range(SIZE)])


def test_an_image_of_a_prompt_is_stored_once_for_all_of_its_samples(ends: Ends) -> None:
    (image,) = make("image", 1, LENGTH)["image"]
    ends.writer.admit([(3, 8, "val", {"image": image})])
    for client in (ends.near, ends.far):
        batch = take(client, "own")
        (found,) = batch.group("image")
        check([image], [found])
        assert all(one is found for one in batch["image"])
        check([image], batch.packed(("image",), Buffers())["image"])
        client.release(batch.lease)


def test_images_of_several_sizes_are_one_column() -> None:
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (height, width, 3), dtype=np.uint8) for height, width in ((4, 9), (0, 5), (7, 1))]
    block = Block.parse(_bytes(pack([SampleId(0, index) for index in range(3)], {"image": images})))
    check(images, [block.column("image")[row] for row in range(3)])
    check(images[1:], block.column("image").piece(1, 3))


def test_more_than_256_experts_are_carried_as_int16() -> None:
    routing = [np.full((tokens, 61, 8), tokens, np.int16) for tokens in (300, 0, 1)]
    block = Block.parse(_bytes(pack([SampleId(0, index) for index in range(3)], {"routing": routing})))
    check(routing, [block.column("routing")[row] for row in range(3)])


def _bytes(block) -> bytearray:
    buffer = bytearray(block.nbytes)
    block.write_into(memoryview(buffer))
    return buffer
