import pickle

import numpy as np
import pytest

from tranship.dock import DockClient, DockFull, StaleLease, StaleSlab
from tranship.types import RunError, SampleId


def test_errors_cross_a_process_border_unchanged():
    for error in (StaleLease("a lease"), StaleSlab("a slab"), DockFull("full")):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error)
        assert copy.args == error.args
    assert issubclass(DockFull, RunError)
    assert issubclass(StaleLease, RuntimeError)


def test_messages_are_small_and_picklable(make_rig):
    rig = make_rig(batch_groups=8, size=8)
    rig.make_ready()
    answer = rig.dock.ask("take_batch", "train", "worker", groups=8)
    assert pickle.loads(pickle.dumps(answer)) == answer
    assert len(pickle.dumps(answer)) < 64 * 100


def test_it_asks_again_only_after_a_change(make_rig):
    rig = make_rig(batch_groups=2)
    client = rig.client
    assert client.changed_since_last_take("rollout")
    assert rig.start() is None
    assert not client.changed_since_last_take("rollout")
    rig.admit()
    assert client.changed_since_last_take("rollout")
    batch = rig.start(5)
    assert client.changed_since_last_take("rollout")
    assert rig.start(5) is None
    assert not client.changed_since_last_take("rollout")
    rig.generate(batch)
    assert client.changed_since_last_take("rollout")


def test_a_lease_that_expires_is_a_change(make_rig):
    rig = make_rig(batch_groups=1, lease_s=10)
    rig.admit()
    rig.start()
    assert rig.start() is None
    assert not rig.client.changed_since_last_take("rollout")
    rig.clock.now = 11.0
    assert rig.client.changed_since_last_take("rollout")
    assert rig.start() is not None


def test_kinds_are_remembered_apart(make_rig):
    rig = make_rig()
    rig.client.take("validate", max_groups=1, kinds=("val",))
    rig.admit()
    rig.client.take("validate", max_groups=1, kinds=("train",))
    assert rig.client.changed_since_last_take("validate")
    assert rig.client.changed_since_last_take("validate", kinds=("val",))
    assert not rig.client.changed_since_last_take("validate", kinds=("train",))
    assert rig.client.changed_since_last_take("validate", kinds=("val", "train"))


def test_a_sampler_held_back_by_its_version_asks_again_with_new_weights(make_rig):
    rig = make_rig(batch_groups=1, staleness=0)
    rig.make_ready()
    rig.train()
    rig.admit()
    assert rig.start(version=0) is None
    assert rig.client.changed_since_last_take("rollout")
    assert not rig.client.changed_since_last_take("rollout", version=0)
    assert rig.client.changed_since_last_take("rollout", version=1)
    assert rig.start(version=1) is not None


def test_a_seq_that_is_known_here_spares_the_question(make_rig):
    rig = make_rig()
    asked = []

    def call(method, *args, **kwargs):
        asked.append(method)
        return getattr(rig.dock, method)(*args, **kwargs)

    client = DockClient(call, "reader", wait_s=0, seen_seq=lambda _: rig.dock.seq)
    client.take("rollout", max_groups=1)
    asked.clear()
    assert not client.changed_since_last_take("rollout")
    rig.admit()
    assert client.changed_since_last_take("rollout")
    assert asked == []


def test_a_put_is_one_message_and_a_take_is_one(make_rig):
    rig = make_rig(batch_groups=1)
    asked = []

    def call(method, *args, **kwargs):
        asked.append(method)
        return getattr(rig.dock, method)(*args, **kwargs)

    client = DockClient(call, "c", wait_s=0)
    client.admit([(0, 2, "train", {"prompt": np.arange(3, dtype=np.int32)})])
    assert asked == ["payload_folder", "lease_slab", "map_slab", "admit"]
    asked.clear()
    batch = client.take("rollout", max_groups=1, version=0)
    client.put(batch.ids, {"response": [np.arange(3)] * 2}, batch.lease)
    assert batch["prompt"][0].tolist() == [0, 1, 2]
    assert asked == ["ask", "publish", "map_slab"]


def test_a_refused_put_leaves_no_hole(make_rig):
    rig = make_rig(batch_groups=2, slab_bytes=4096, capacity_bytes=4096)
    rig.admit()
    batch = rig.start()
    rig.client.release(batch.lease)
    for _ in range(100):
        with pytest.raises(StaleLease):
            rig.client.put(batch.ids, {"response": [np.zeros(100)] * 2}, batch.lease)
    assert rig.start() is not None


def test_memory_is_the_same_after_many_rounds(make_rig):
    rig = make_rig(batch_groups=4, slab_bytes=1 << 12, capacity_bytes=1 << 20)
    held = []
    for _ in range(50):
        rig.make_ready()
        rig.train()
        held.append(rig.dock.memory_use().held_bytes)
    assert held[-1] <= 1.05 * held[5]
    assert held[-1] <= 6 << 12


def test_a_full_dock_says_what_is_needed(make_rig):
    rig = make_rig(batch_groups=3, slab_bytes=1 << 14, capacity_bytes=1 << 15)
    rig.admit()
    batch = rig.start(3)
    rig.client.put(batch.ids[:2], {"response": [np.zeros(900)] * 2}, batch.lease)
    rig.client.put(batch.ids[2:4], {"response": [np.zeros(900)] * 2}, batch.lease)
    with pytest.raises(DockFull, match=r"worker waited 0\.0 s for room.*32768 of 32768 bytes.*dock\.capacity_bytes"):
        rig.client.put(batch.ids[4:], {"response": [np.zeros(900)] * 2}, batch.lease)


def test_a_slab_that_was_taken_away_is_replaced(make_rig):
    rig = make_rig(batch_groups=1)
    rig.admit()
    rig.dock.retire("worker")
    batch = rig.start()
    rig.generate(batch)
    rig.score()
    assert rig.train() == [0]


def test_late_reading_is_noticed(make_rig, client_of):
    rig = make_rig(batch_groups=1, slab_bytes=4096, lease_s=10)
    rig.make_ready()
    late = client_of(rig, "late")
    batch = late.take_batch("train", groups=1)
    rig.clock.now = 11.0
    rig.train()
    for _ in range(20):
        rig.make_ready()
        rig.train()
    with pytest.raises(StaleSlab):
        batch["response"]
    with pytest.raises(StaleLease):
        late.check([batch.lease])


def test_nothing_to_put_is_no_message(make_rig):
    rig = make_rig()
    seq = rig.dock.seq
    rig.client.put([], {})
    rig.client.admit([])
    assert rig.dock.seq == seq


def test_a_value_that_cannot_be_carried_is_named_before_anything_is_sent(make_rig):
    rig = make_rig(batch_groups=1)
    rig.admit()
    with pytest.raises(ValueError, match="column 'response': a value cannot be carried"):
        rig.client.put([SampleId(0, 0)], {"response": [object()]})
