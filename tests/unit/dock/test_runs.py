"""Payload over the network: the right bytes or an error, never another row's."""

from __future__ import annotations

import os
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tranship.dock import Block, StaleSlab, Warehouse, pack
from tranship.dock.frames import ConnectionLost, connect
from tranship.dock.messages import BlockRef
from tranship.dock.reader import Run
from tranship.dock.remote import RemoteReader
from tranship.dock.runs import COUNT, PUT, RUN, RunServer
from tranship.dock.slab import PAYLOAD_AT, map_file
from tranship.types import SampleId

SECRET = b"sixteen bytes or more"


class Rig:
    def __init__(self, root) -> None:
        self.warehouse = Warehouse("runs", 1 << 18, 1 << 22, True, root=root)
        assert self.warehouse.folder is not None
        self.server = RunServer(self.warehouse.folder, "tcp:127.0.0.1:0", secret=SECRET).start()

    def reader(self) -> RemoteReader:
        return RemoteReader(self.server.address, SECRET)

    def write(self, values, owner="me") -> BlockRef:
        block = pack([SampleId(0, i) for i in range(len(values))], {"x": values, "y": [None] * len(values)})
        lease = self.warehouse.lease_slab(owner, block.nbytes)
        assert lease is not None
        assert lease.path is not None
        ref = BlockRef(lease.slab, lease.generation, PAYLOAD_AT, block.nbytes)
        block.write_into(map_file(lease.path, writable=True)[PAYLOAD_AT : PAYLOAD_AT + block.nbytes])
        return ref

    def recycle(self, ref: BlockRef) -> None:
        self.warehouse.retain(ref.slab, 1)
        self.warehouse.lease_slab("me", 100, giving_up=ref.slab)
        self.warehouse.release(ref.slab, 1)

    def close(self) -> None:
        self.server.close()
        self.warehouse.close()


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path)
    yield rig
    rig.close()


def values_of(block: Block) -> list[np.ndarray]:
    return [block.column("x")[i] for i in range(len(block.rows))]


@pytest.mark.parametrize("count", [1, 3, 3000])
def test_a_block_comes_over(rig, count):
    """Also one whose head is longer than the first message fetches."""
    values = [np.arange(i % 5, dtype=np.int32) + i for i in range(count)]
    ref = rig.write(values)
    reader = rig.reader()
    head = reader.heads([ref])[0]
    at, nbytes = head.column("x").span(0, count)
    out = np.empty(nbytes, np.uint8)
    reader.read([Run(ref, at, out)], [ref])
    assert out.view(np.int32).tolist() == np.concatenate(values).tolist()
    block = reader.open(ref)
    assert [value.tolist() for value in values_of(block)] == [value.tolist() for value in values]
    assert block.column("y")[0] is None


def test_a_recycled_slab_is_an_error_at_every_step(rig):
    values = [np.arange(60000, dtype=np.int32)]
    ref = rig.write(values)
    reader = rig.reader()
    head = reader.heads([ref])[0]
    at, nbytes = head.column("x").span(0, 1)
    rig.recycle(ref)
    with pytest.raises(StaleSlab, match="recycled"):
        reader.read([Run(ref, at, np.empty(nbytes, np.uint8))], [ref])
    for read in (lambda r: r.open(ref), lambda r: r.heads([ref])):
        with pytest.raises(StaleSlab, match="recycled"):
            read(rig.reader())
    again = rig.write(values)
    assert again.slab == ref.slab
    assert rig.reader().open(again).rows == [SampleId(0, 0)]


def test_bytes_that_were_overwritten_on_their_way_are_not_handed_on(rig, monkeypatch):
    """The slab is recycled after the bytes were asked for, and before they are believed."""
    ref = rig.write([np.arange(60000, dtype=np.int32)])
    reader = rig.reader()
    at, nbytes = reader.heads([ref])[0].column("x").span(0, 1)
    fetch = reader._fetch

    def fetch_slowly(runs):
        fetch(runs)
        rig.recycle(ref)

    monkeypatch.setattr(reader, "_fetch", fetch_slowly)
    with pytest.raises(StaleSlab):
        reader.read([Run(ref, at, np.empty(nbytes, np.uint8))], [ref])


def test_what_is_known_already_is_believed_only_while_it_holds(rig):
    ref = rig.write([np.arange(10, dtype=np.int32)])
    reader = rig.reader()
    reader.open(ref)
    rig.recycle(ref)
    with pytest.raises(StaleSlab):
        reader.open(ref)


def test_a_slab_that_is_gone_is_an_error(rig):
    with pytest.raises(StaleSlab):
        rig.reader().open(BlockRef(99, 1, 64, 128))


def test_a_server_that_is_gone_is_named(rig):
    ref = rig.write([np.arange(10, dtype=np.int32)])
    reader = rig.reader()
    rig.server.close()
    with pytest.raises(ConnectionLost, match="payload's server at tcp:127"):
        reader.open(ref)


def test_a_stranger_gets_nothing(rig):
    with pytest.raises(ConnectionLost):
        RemoteReader(rig.server.address, b"another secret, as long")


def test_a_block_is_sent_to_its_place(rig):
    block = pack([SampleId(0, i) for i in range(3)], {"x": [np.arange(i) for i in range(3)]})
    lease = rig.warehouse.lease_slab("far", 2 * block.nbytes)
    made = bytearray(block.nbytes)
    block.write_into(memoryview(made), generation=lease.generation)
    writer, reader = rig.reader(), rig.reader()
    for place in (0, 1):
        ref = BlockRef(lease.slab, lease.generation, PAYLOAD_AT + place * block.nbytes, block.nbytes)
        writer.write(ref, memoryview(made))
        assert [value.tolist() for value in values_of(reader.open(ref))] == [[], [0], [0, 1]]
    late = ref._replace(generation=ref.generation + 1)
    with pytest.raises(StaleSlab):
        writer.write(late, memoryview(made))
    assert len(writer.open(ref).rows) == 3


@pytest.mark.parametrize("at", [0, 1 << 19, 2**64 - 1])
def test_a_block_goes_nowhere_but_into_its_slab(rig, at):
    ref = rig.write([np.arange(10, dtype=np.int32)])
    with connect(rig.server.address, SECRET, 5.0) as stream:
        stream.sendall(COUNT.pack(*PUT) + RUN.pack(ref.slab, ref.generation, at, 64))
        assert stream.recv(1) == b""
    assert len(rig.reader().open(ref).rows) == 1


def request(*runs: tuple[int, int, int, int]) -> bytes:
    return COUNT.pack(len(runs), 0) + b"".join(RUN.pack(*run) for run in runs)


@pytest.mark.parametrize(
    "make",
    [
        lambda ref: request((ref.slab, ref.generation, 0, 64)),
        lambda ref: request((ref.slab, ref.generation, 64, 1 << 19)),
        lambda ref: request((ref.slab, ref.generation, 2**64 - 1, 64)),
        lambda ref: request((ref.slab, ref.generation, 64, 2**63)),
        lambda ref: COUNT.pack(0, 0),
        lambda ref: COUNT.pack(2**32 - 1, 0),
        lambda ref: COUNT.pack(1, 1),
    ],
    ids=["header", "past the end", "far away", "too much", "nothing", "too many", "both"],
)
def test_a_malformed_request_ends_its_own_connection_alone(rig, make):
    ref = rig.write([np.arange(10, dtype=np.int32)])
    other = rig.reader()
    with connect(rig.server.address, SECRET, 5.0) as stream:
        stream.sendall(make(ref))
        assert stream.recv(1) == b""
    assert len(other.open(ref).rows) == 1


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=120))
def test_any_bytes_harm_nobody(shared_rig, data):
    rig, ref, good = shared_rig
    with connect(rig.server.address, SECRET, 5.0) as stream:
        stream.sendall(data)
    assert len(good.open(ref).rows) == 1


@pytest.fixture(scope="module")
def shared_rig(tmp_path_factory):
    rig = Rig(tmp_path_factory.mktemp("runs"))
    ref = rig.write([np.arange(10, dtype=np.int32)])
    yield rig, ref, rig.reader()
    rig.close()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_damaged_block_is_a_value_error(shared_rig, data):
    """Whoever receives a head that was damaged finds out by reading it."""
    block = pack([SampleId(0, i) for i in range(3)], {"x": [np.arange(4)] * 3, "y": ["a", "b", "c"]})
    sent = bytearray(block.nbytes)
    block.write_into(memoryview(sent))
    for _ in range(data.draw(st.integers(1, 3))):
        sent[data.draw(st.integers(0, 400))] = data.draw(st.integers(0, 255))
    try:
        length = Block.head_bytes(memoryview(sent), len(sent))
        assert 64 <= length <= len(sent)
        Block.parse(sent, head_only=True)
    except ValueError:
        return


def test_the_server_opens_files_of_its_folder_only(rig):
    """Slabs are named by number: there is no way to name another file."""
    assert struct.calcsize(RUN.format) == 32
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(StaleSlab):
        rig.reader().open(BlockRef(2**63, 1, 64, 128))
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 3
