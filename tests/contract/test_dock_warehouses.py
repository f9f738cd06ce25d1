"""A stage sees the same whether the payload is memory of this process or shared between processes."""

from __future__ import annotations

import numpy as np
import pytest

from tranship.dock import Batch, Bfloat16, Dock, DockClient, StageNeeds, StaleLease, StaleSlab

STAGES = (
    StageNeeds("rollout", ("prompt",)),
    StageNeeds("reward", ("prompt", "response")),
    StageNeeds("train", ("prompt", "response", "reward")),
)


class Rig:
    def __init__(self, shared: bool, root, *, lease_s: float = 1000.0) -> None:
        self.now = 0.0
        self.dock = Dock(
            STAGES,
            run_id="contract",
            batch_groups=2,
            staleness=1,
            lease_s=lease_s,
            slab_bytes=1 << 13,
            capacity_bytes=1 << 17,
            shared=shared,
            ordered=False,
            clock=lambda: self.now,
            root=root,
        )

    def client(self, owner: str) -> DockClient:
        return DockClient(lambda method, *args, **kwargs: getattr(self.dock, method)(*args, **kwargs), owner, wait_s=1)


@pytest.fixture(params=[False, True], ids=["private", "shared"])
def rig(request, tmp_path):
    rig = Rig(request.param, tmp_path)
    yield rig
    rig.dock.close()
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
