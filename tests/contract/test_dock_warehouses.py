"""A stage sees the same wherever the payload is, and however the dock is reached: memory of this process, shared
memory, a service at a Unix socket or at TCP, and payload that is fetched as from another node."""

from __future__ import annotations

import numpy as np
import pytest

from tranship.dock import Batch, Bfloat16, Dock, DockClient, StageNeeds, StaleLease, StaleSlab
from tranship.dock.place import Place
from tranship.dock.runs import RunServer
from tranship.dock.service import DockService

STAGES = (
    StageNeeds("rollout", ("prompt",)),
    StageNeeds("reward", ("prompt", "response")),
    StageNeeds("train", ("prompt", "response", "reward")),
)


SECRET = b"a secret of this test"
WAYS = ("private", "shared", "unix", "tcp", "remote")


class Rig:
    def __init__(self, way: str, root, *, lease_s: float = 1000.0) -> None:
        self.way = way
        self.now = 0.0
        self.dock = Dock(
            STAGES,
            run_id="contract",
            batch_groups=2,
            staleness=1,
            lease_s=lease_s,
            slab_bytes=1 << 13,
            capacity_bytes=1 << 17,
            shared=way != "private",
            ordered=False,
            clock=lambda: self.now,
            root=root,
        )
        self.clients: dict[str, DockClient] = {}
        if way in ("private", "shared"):
            return
        folder = self.dock.payload_folder()
        assert folder is not None
        self.runs = RunServer(folder, "tcp:127.0.0.1:0", secret=SECRET).start()
        place = Place.of_folder(folder, self.runs.address)
        address = f"unix:{root / 'dock'}" if way == "unix" else "tcp:127.0.0.1:0"
        self.service = DockService(self.dock, [address], secret=SECRET, place=place).start()

    def client(self, owner: str) -> DockClient:
        """The client of that name: one, since a name that is gone loses its leases."""
        if owner not in self.clients:
            self.clients[owner] = self._connect(owner)
        return self.clients[owner]

    def _connect(self, owner: str) -> DockClient:
        if self.way in ("private", "shared"):
            dock = self.dock
            return DockClient(lambda method, *args, **kwargs: getattr(dock, method)(*args, **kwargs), owner, wait_s=1)
        node = "elsewhere" if self.way == "remote" else None
        return DockClient.connect(self.service.addresses[0], SECRET, owner, wait_s=1, node=node)

    def close(self) -> None:
        if self.way not in ("private", "shared"):
            self.service.close()
            self.runs.close()
        self.dock.close()


@pytest.fixture(params=WAYS)
def rig(request, tmp_path):
    rig = Rig(request.param, tmp_path)
    yield rig
    rig.close()
    assert list(tmp_path.iterdir()) == []


def one_step(rig: Rig, values: list, first: int = 0) -> Batch:
    """Two groups of len(values) / 2 rows, put by one client and read by another, as far as the batch."""
    writer, reader = rig.client("writer"), rig.client("reader")
    size = len(values) // 2
    writer.admit([(first + i, size, "train", {"prompt": np.arange(i + 1, dtype=np.int32)}) for i in range(2)])
    batch = writer.take("rollout", max_groups=2, version=rig.dock.version)
    assert batch is not None
    writer.put(batch.ids, {"response": values}, batch.lease, rig.dock.version)
    writer.ack(batch.lease)
    scored = reader.take("reward", max_groups=2)
    assert scored is not None
    reader.put(scored.ids, {"reward": [{"status": "scored"}] * len(values)}, scored.lease)
    reader.ack(scored.lease)
    trained = reader.take_batch("train", groups=2)
    assert trained is not None
    return trained


VALUES = [None, "text", {"a": [1, {"b": None}]}, True, 2**53 + 1, [], (1, (2,)), 1.5, b"\x00", -(2**63)]


def test_objects_come_back_equal_and_in_the_same_type(rig):
    batch = one_step(rig, VALUES)
    assert batch["response"] == VALUES
    assert [type(value) for value in batch["response"]] == [type(value) for value in VALUES]


@pytest.mark.parametrize(
    "values",
    [
        [np.ones((3, 3), np.float32), np.ones((3, 4), np.float32)],
        [np.empty(0, np.int32), np.arange(5, dtype=np.int32)],
        [np.array([True, False]), np.array([], bool)],
        [np.arange(3, dtype=np.int64), None],
    ],
    ids=str,
)
def test_arrays_come_back_equal(rig, values):
    for value, wanted in zip(one_step(rig, values)["response"], values, strict=True):
        np.testing.assert_array_equal(value, wanted)
        if wanted is not None:
            assert value.dtype == wanted.dtype


def test_bfloat16_comes_back(rig):
    values = [Bfloat16(np.array([1, 2, 3], np.uint16)), Bfloat16(np.array([], np.uint16))]
    assert one_step(rig, values)["response"] == values


def test_what_was_read_cannot_be_changed(rig):
    batch = one_step(rig, [np.arange(4), np.arange(2)])
    for array in (batch["response"][0], batch["prompt"][0], batch.group("prompt")[1]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
        with pytest.raises(ValueError):
            array.flags.writeable = True


def test_many_steps_hold_no_more_memory_than_a_few(rig):
    held = []
    for step in range(50):
        batch = one_step(rig, [np.full(300, step * 2 + i) for i in range(4)], first=2 * step)
        for i, value in enumerate(batch["response"]):
            assert value.tolist() == [step * 2 + i] * 300
        client = rig.client("trainer")
        client.check([batch.lease])
        client.trained(batch.lease)
        client.advance(step + 1)
        held.append(rig.dock.memory_use().held_bytes)
    assert held[-1] <= 1.05 * held[5]
    assert rig.dock.ledger.trained == 100


def test_a_reader_that_comes_too_late_never_sees_another_rows_bytes(rig):
    batch = one_step(rig, [np.full(300, 1) for _ in range(2)])
    rig.now = 2000.0
    again = rig.client("other").take_batch("train", groups=2)
    assert again is not None
    rig.client("other").trained(again.lease)
    rig.client("other").advance(1)
    for step in range(1, 10):
        trained = one_step(rig, [np.full(300, 2) for _ in range(2)], first=2 * step)
        rig.client("other").trained(trained.lease)
        rig.client("other").advance(step + 1)
    with pytest.raises(StaleSlab):
        batch["response"]
    with pytest.raises(StaleLease):
        rig.client("reader").check([batch.lease])


def test_a_block_larger_than_a_slab_is_carried(rig):
    values = [np.arange(4000), np.arange(3000)]
    for value, wanted in zip(one_step(rig, values)["response"], values, strict=True):
        np.testing.assert_array_equal(value, wanted)
