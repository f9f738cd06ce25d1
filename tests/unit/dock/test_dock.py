import msgpack
import numpy as np
import pytest

from tranship.dock import StageNeeds, StaleLease
from tranship.types import SampleId, UserError


def test_a_synchronous_run_trains_the_groups_in_order(make_rig):
    rig = make_rig(batch_groups=3)
    windows = []
    for _ in range(4):
        rig.make_ready()
        windows.append(rig.train())
    assert windows == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert rig.dock.ledger_counts() == {
        "admitted": 12,
        "trained": 12,
        "dropped": {},
        "in_flight": 0,
        "val_admitted": 0,
        "val_ended": 0,
    }


def test_an_incomplete_group_is_handed_to_nobody_who_wants_whole_ones(make_rig):
    rig = make_rig(batch_groups=1, size=4)
    rig.admit()
    batch = rig.start()
    rig.client.put(batch.ids[:3], {"response": [np.arange(2)] * 3, "reward": [1.0] * 3}, batch.lease)
    assert rig.take_batch() is None
    assert len(rig.client.take_rows("score", max_rows=10).ids) == 3
    rig.client.put(batch.ids[3:], {"response": [np.arange(2)], "reward": [1.0]}, batch.lease)
    assert len(rig.take_batch().ids) == 4


def test_of_ten_ready_groups_eight_are_taken_and_two_remain(make_rig):
    rig = make_rig(batch_groups=8, staleness=1)
    rig.make_ready(10)
    batch = rig.take_batch()
    assert [group.group_id for group in batch.groups] == list(range(8))
    rig.client.trained(batch.lease)
    assert rig.dock.ledger.in_flight == 2


def test_a_reader_gets_at_most_what_it_asks_for_and_nobody_gets_it_twice(make_rig, client_of):
    rig = make_rig(batch_groups=10)
    rig.admit()
    other = client_of(rig, "other")
    first = rig.client.take("rollout", max_groups=8, version=0)
    second = other.take("rollout", max_groups=8, version=0)
    assert [group.group_id for group in first.groups] == list(range(8))
    assert [group.group_id for group in second.groups] == [8, 9]
    assert rig.start() is None


def test_a_batch_is_grouped_and_repeats_the_groups_own_columns_by_reference(make_rig):
    rig = make_rig(batch_groups=2, size=3)
    rig.make_ready()
    batch = rig.take_batch()
    assert [(group.group_id, group.size, group.rows) for group in batch.groups] == [
        (0, 3, range(3)),
        (1, 3, range(3, 6)),
    ]
    assert batch.ids == [SampleId(group_id, index) for group_id in (0, 1) for index in range(3)]
    assert batch["prompt"][0] is batch["prompt"][2]
    assert batch["prompt"][3] is batch.group("prompt")[1]
    assert len(batch["reward"]) == 6
    with pytest.raises(KeyError, match="does not read column 'logprobs'"):
        batch["logprobs"]
    with pytest.raises(KeyError, match="no column of a group"):
        batch.group("reward")


def test_a_batch_that_was_read_cannot_change_the_dock(make_rig):
    rig = make_rig(batch_groups=1)
    rig.make_ready()
    batch = rig.take_batch()
    with pytest.raises(ValueError, match="read-only"):
        batch["response"][1][:] = 0
    batch["reward"][0]["value"] = 99.0
    rig.client.release(batch.lease)
    assert rig.take_batch()["reward"][0]["value"] == 0.0


def test_rows_of_different_groups_come_together_for_a_stage_of_rows(make_rig):
    rig = make_rig(batch_groups=2, size=2)
    rig.admit()
    rig.generate(rig.start(2))
    batch = rig.client.take_rows("score", max_rows=3)
    assert batch.ids == [SampleId(0, 0), SampleId(0, 1), SampleId(1, 0)]
    assert [(group.group_id, group.rows) for group in batch.groups] == [(0, range(2)), (1, range(2, 3))]
    assert rig.client.take_rows("score", max_rows=3).ids == [SampleId(1, 1)]


def test_validation_groups_flow_beside_training_and_count_apart(make_rig):
    rig = make_rig(batch_groups=1)
    rig.client.admit([(-1, 1, "val", {"prompt": np.array([5], np.int32)})])
    assert rig.dock.num_admissible() == 1
    assert rig.start() is None
    batch = rig.client.take("rollout", max_groups=5, version=0, kinds=("val", "train"))
    assert batch.groups[0].kind == "val"
    rig.client.put(batch.ids, {"response": [np.arange(3)], "reward": [1.0]}, batch.lease, 0)
    rig.client.ack(batch.lease)
    assert rig.take_batch() is None
    assert rig.client.take("validate", max_groups=5) is None
    scored = rig.client.take("validate", max_groups=5, kinds=("val",))
    assert scored["reward"] == [1.0]
    rig.client.ack(scored.lease)
    rig.client.finish_val([-1])
    rig.client.finish_val([-1])
    assert rig.dock.ledger_counts()["val_ended"] == 1
    assert rig.dock.ledger.admitted == 0
    rig.make_ready()
    assert rig.train() == [0]
    rig.admit()
    with pytest.raises(ValueError, match="training group"):
        rig.client.finish_val([1])


def test_dropped_groups_leave_their_place_in_the_batch_empty(make_rig):
    rig = make_rig(batch_groups=3)
    rig.admit()
    batch = rig.start(3)
    rig.client.drop([1], "filtered", batch.lease)
    rest = [sample for sample in batch.ids if sample.group_id != 1]
    rig.client.put(rest, {"response": [np.arange(2)] * 4, "reward": [1.0] * 4}, batch.lease)
    rig.client.ack(batch.lease)
    taken = rig.take_batch()
    assert taken.window == (0, 1, 2)
    assert taken.num_dropped == 1
    assert [group.group_id for group in taken.groups] == [0, 2]
    assert rig.client.trained(taken.lease) == [0, 2]
    assert rig.dock.ledger.outcome(1) == "filtered"


def test_a_batch_in_which_everything_was_dropped_is_a_batch(make_rig):
    rig = make_rig(batch_groups=2)
    rig.admit()
    batch = rig.start(2)
    rig.client.drop([0, 1], "invalid:all", batch.lease)
    with pytest.raises(StaleLease):
        rig.client.ack(batch.lease)
    taken = rig.take_batch()
    assert (taken.ids, taken.window, taken.num_dropped) == ([], (0, 1), 2)
    rig.client.check([taken.lease])
    assert rig.client.trained(taken.lease) == []
    rig.client.advance(1)
    assert rig.dock.num_admissible() == 2
    assert rig.dock.ledger.invalid == 2


def test_a_group_can_be_dropped_out_of_the_batch_that_is_being_trained(make_rig):
    rig = make_rig(batch_groups=2)
    rig.make_ready()
    batch = rig.take_batch()
    rig.client.drop([1], "invalid:nan", batch.lease)
    rig.client.check([batch.lease])
    assert rig.client.trained(batch.lease) == [0]
    rig.client.advance(1)
    assert rig.dock.num_admissible() == 2


def test_a_batch_given_back_comes_again_as_it_was(make_rig):
    rig = make_rig(batch_groups=3)
    rig.make_ready()
    batch = rig.take_batch()
    rig.client.drop([1], "invalid:nan", batch.lease)
    rig.client.release(batch.lease)
    again = rig.take_batch()
    assert again.window == (0, 1, 2)
    assert again.num_dropped == 1
    assert rig.client.trained(again.lease) == [0, 2]


def test_a_batch_cannot_be_trained_twice_nor_taken_twice(make_rig):
    rig = make_rig(batch_groups=1, staleness=2)
    rig.make_ready()
    batch = rig.take_batch()
    assert rig.take_batch() is None
    rig.client.trained(batch.lease)
    with pytest.raises(StaleLease):
        rig.client.trained(batch.lease)
    assert rig.take_batch() is None
    rig.client.advance(1)
    assert rig.take_batch() is not None
    with pytest.raises(AssertionError, match="cannot end"):
        rig.client.advance(2)


def test_versions_go_up_by_one(make_rig):
    rig = make_rig(batch_groups=1)
    rig.make_ready()
    rig.client.trained(rig.take_batch().lease)
    with pytest.raises(AssertionError, match="cannot be followed by 2"):
        rig.client.advance(2)


# Leases


def test_an_expired_lease_returns_its_rows_and_is_refused(make_rig, client_of):
    rig = make_rig(batch_groups=2, lease_s=10)
    rig.admit()
    slow = rig.start()
    rig.clock.now = 10.5
    quick = client_of(rig, "quick").take("rollout", max_groups=5, version=0)
    assert [group.group_id for group in quick.groups] == [0, 1]
    with pytest.raises(StaleLease):
        rig.generate(slow)
    for late in (rig.client.ack, rig.client.release, rig.client.renew, rig.client.trained):
        with pytest.raises(StaleLease):
            late(slow.lease)
    with pytest.raises(StaleLease):
        rig.client.check([quick.lease, slow.lease])
    with pytest.raises(StaleLease):
        rig.client.drop([0], "filtered", slow.lease)
    assert [(lease.reader, lease.group_ids) for lease in rig.dock.expire()] == [("worker", (0,))]
    assert rig.dock.expire() == []
    rig.client.ack(quick.lease)


@pytest.mark.parametrize("message", ["renew", "check", "put"])
def test_any_message_renews_a_lease(make_rig, client_of, message):
    rig = make_rig(batch_groups=2, lease_s=10)
    rig.admit()
    batch = rig.start()
    for now in range(8, 80, 8):
        rig.clock.now = float(now)
        if message == "renew":
            assert rig.client.renew(batch.lease) == ()
        elif message == "check":
            rig.client.check([batch.lease])
        else:
            rig.client.put([batch.ids[0]], {f"c{now}": [1]}, batch.lease)
    assert rig.dock.expire() == []
    rig.generate(batch)


def test_a_renewed_lease_does_not_hide_an_older_one_that_is_over(make_rig):
    rig = make_rig(batch_groups=2, lease_s=10)
    rig.admit()
    first, second = rig.start(), rig.start()
    rig.clock.now = 8.0
    rig.client.renew(first.lease)
    rig.clock.now = 11.0
    assert [lease.lease for lease in rig.dock.expire()] == [second.lease]
    rig.generate(first)


def test_a_late_message_counts_while_nobody_has_noticed(make_rig):
    rig = make_rig(batch_groups=1, lease_s=10)
    rig.make_ready()
    batch = rig.take_batch()
    rig.clock.now = 1000.0
    rig.client.check([batch.lease])
    assert rig.client.trained(batch.lease) == [0]


def test_work_done_twice_counts_once(make_rig, client_of):
    """A worker dies after it has put half a group; the next one does all of it again. The first half stays."""
    rig = make_rig(batch_groups=1, lease_s=10)
    rig.admit()
    first = rig.start()
    rig.client.put(first.ids[:1], {"response": [np.full(2, 7)]}, first.lease)
    rig.clock.now = 11.0
    other = client_of(rig, "other")
    second = other.take("rollout", max_groups=1, version=0)
    other.put(second.ids, {"response": [np.full(2, 8)] * 2, "reward": [1.0] * 2}, second.lease)
    other.ack(second.lease)
    assert [value.tolist() for value in rig.take_batch()["response"]] == [[7, 7], [8, 8]]


def test_a_duplicate_message_changes_nothing(make_rig):
    rig = make_rig(batch_groups=1)
    rig.admit()
    batch = rig.start()
    for value in (1, 2):
        rig.client.put(batch.ids, {"response": [np.full(2, value)] * 2, "reward": [value] * 2}, batch.lease)
    assert rig.take_batch()["reward"] == [1, 1]


def test_finishing_some_groups_of_a_lease_keeps_the_others(make_rig):
    rig = make_rig(batch_groups=3, lease_s=10)
    rig.admit()
    batch = rig.start(3)
    rig.client.ack(batch.lease, [1])
    rig.clock.now = 11.0
    assert [group.group_id for group in rig.start(3).groups] == [0, 2]


def test_a_retired_reader_gives_everything_back(make_rig, client_of):
    rig = make_rig(batch_groups=3)
    rig.admit()
    dead = client_of(rig, "dead")
    first = dead.take("rollout", max_groups=1, version=0)
    dead.put(first.ids[:1], {"response": [np.full(1, 3)]}, first.lease)
    second = dead.take("rollout", max_groups=1, version=0)
    rig.client.retire("dead")
    with pytest.raises(StaleLease):
        dead.ack(second.lease)
    batch = rig.start(3)
    assert sorted(group.group_id for group in batch.groups) == [0, 1, 2]


def test_a_lease_whose_groups_were_all_taken_away_says_so(make_rig):
    rig = make_rig(batch_groups=1)
    rig.admit()
    batch = rig.start()
    rig.client.drop([0], "invalid:coordinator", None)
    with pytest.raises(StaleLease, match="have left"):
        rig.client.renew(batch.lease)
    with pytest.raises(StaleLease):
        rig.client.renew(batch.lease)


def test_a_lease_that_lost_one_of_its_groups_learns_which(make_rig):
    rig = make_rig(batch_groups=2)
    rig.admit()
    batch = rig.start(2)
    rig.client.drop([0], "invalid:coordinator", None)
    assert rig.client.renew(batch.lease) == (0,)
    with pytest.raises(StaleLease, match="lost the groups"):
        rig.client.check([batch.lease])
    with pytest.raises(StaleLease, match="have left"):
        rig.client.put(batch.ids[:2], {"response": [1, 2]}, batch.lease)
    with pytest.raises(StaleLease, match="have left"):
        rig.client.drop([0], "filtered", batch.lease)
    rig.generate(batch)
    rig.score()
    taken = rig.take_batch()
    assert [group.group_id for group in taken.groups] == [1]
    assert taken.num_dropped == 1


def test_dropping_passes_over_what_has_left_already(make_rig):
    rig = make_rig(batch_groups=2)
    rig.admit()
    batch = rig.start(2)
    rig.client.drop([0], "invalid:coordinator", None)
    rig.client.drop([0, 1], "filtered", batch.lease)
    assert (rig.dock.ledger.invalid, rig.dock.ledger.filtered) == (1, 1)
    assert rig.take_batch().num_dropped == 2


def test_payload_lives_as_long_as_a_lease_that_may_read_it(make_rig, client_of):
    rig = make_rig(batch_groups=1, slab_bytes=4096, capacity_bytes=4096 * 6)
    rig.admit()
    reader = client_of(rig, "reader")
    batch = reader.take("rollout", max_groups=1, version=0)
    prompt = batch["prompt"][0]
    rig.client.drop([0], "invalid:coordinator", None)
    for group_id in range(-1, -40, -1):
        rig.client.admit([(group_id, 1, "val", {"prompt": np.full(200, group_id, np.int32)})])
        rig.client.finish_val([group_id])
    np.testing.assert_array_equal(prompt, np.zeros(3))
    with pytest.raises(StaleLease):
        reader.renew(batch.lease)
    for group_id in range(-1, -40, -1):
        rig.client.admit([(group_id, 1, "val", {"prompt": np.full(200, group_id, np.int32)})])
        rig.client.finish_val([group_id])
    assert prompt.tolist() != [0, 0, 0]


# Refusals


def test_rows_that_do_not_exist_are_refused(make_rig):
    rig = make_rig(batch_groups=1)
    rig.admit()
    batch = rig.start()
    for row in (SampleId(0, 2), SampleId(0, -2), SampleId(0, 0, 1)):
        with pytest.raises(ValueError, match="is not a row of group 0"):
            rig.client.put([row], {"response": [1]}, batch.lease)
    with pytest.raises(StaleLease, match="not in the dock"):
        rig.client.put([SampleId(5, 0)], {"response": [1]}, batch.lease)


def test_admission_is_refused_beyond_the_bound_and_for_used_ids(make_rig):
    rig = make_rig(batch_groups=2, staleness=1)
    assert rig.dock.num_admissible() == 4
    with pytest.raises(ValueError, match="room for 4"):
        rig.admit(5)
    rig.next_id = 0
    rig.make_ready(2)
    assert rig.dock.num_admissible() == 2
    for group_id, message in ((1, "is in the dock"), (-1, "negative")):
        with pytest.raises(ValueError, match=message):
            rig.client.admit([(group_id, 2, "train", {"prompt": 1})])
    rig.train()
    with pytest.raises(ValueError, match="trained"):
        rig.client.admit([(1, 2, "train", {"prompt": 1})])
    for size, kind in ((0, "train"), (1, "test")):
        with pytest.raises(ValueError, match="cannot be of kind"):
            rig.client.admit([(9, size, kind, {"prompt": 1})])
    with pytest.raises(ValueError, match="twice"):
        rig.client.admit([(9, 1, "train", {"prompt": 1}), (9, 1, "train", {"prompt": 1})])
    with pytest.raises(ValueError, match="has the columns"):
        rig.client.admit([(9, 1, "train", {"prompt": 1}), (10, 1, "train", {"text": 1})])
    assert rig.dock.ledger.admitted == 2


def test_stages_are_asked_in_their_own_way(make_rig):
    rig = make_rig(batch_groups=2)
    with pytest.raises(ValueError, match="no stage is called 'rollouts'"):
        rig.client.take("rollouts", max_groups=1)
    with pytest.raises(ValueError, match="takes by row, not by group"):
        rig.client.take("score", max_groups=1)
    with pytest.raises(ValueError, match="takes by group, not by row"):
        rig.client.take_rows("rollout", max_rows=1)
    with pytest.raises(ValueError, match="0 groups were asked for"):
        rig.client.take("rollout", max_groups=0)
    with pytest.raises(ValueError, match="0 rows were asked for"):
        rig.client.take_rows("score", max_rows=0)
    with pytest.raises(ValueError, match="a batch of 3 groups"):
        rig.client.take_batch("train", groups=3)
    rig.take_batch()
    with pytest.raises(ValueError, match="use take_batch"):
        rig.client.take("train", max_groups=1)
    with pytest.raises(ValueError, match="batches go to stage 'train'"):
        rig.client.take_batch("validate", groups=2)
    rig.make_ready()
    batch = rig.take_batch()
    with pytest.raises(ValueError, match="ends by trained or release"):
        rig.client.ack(batch.lease)
    rig.client.trained(batch.lease)
    rig.client.advance(1)
    rig.admit()
    with pytest.raises(ValueError, match="ends by ack or release"):
        rig.client.trained(rig.start(1).lease)


def test_two_stages_of_one_name_are_refused(make_rig):
    with pytest.raises(ValueError, match="stands twice"):
        make_rig(stages=(StageNeeds("a", ()), StageNeeds("a", ("x",))))


# Snapshots


@pytest.mark.parametrize("ordered", [True, False])
def test_a_snapshot_goes_on_with_the_groups_that_were_in_flight(make_rig, ordered):
    rig = make_rig(batch_groups=2, staleness=2, ordered=ordered)
    rig.make_ready(4)
    rig.admit(2)
    batch = rig.start(2)
    rig.client.drop([4], "filtered", batch.lease)
    rig.client.trained(rig.take_batch().lease)
    snapshot = msgpack.unpackb(msgpack.packb(rig.client.snapshot()))
    assert snapshot["version"] == 1
    again = make_rig(batch_groups=2, staleness=2, ordered=ordered)
    assert again.client.restore(snapshot) == [2, 3, 5]
    assert again.dock.version == 1
    assert again.dock.num_admissible() == 5
    again.client.admit([(group_id, 2, "train", {"prompt": np.full(3, group_id, np.int32)}) for group_id in (2, 3, 5)])
    again.next_id = 6
    again.make_ready(2)
    windows = [again.train(), again.train(), again.train()]
    if ordered:
        assert windows == [[2, 3], [4, 5], [6, 7]]
    assert sorted(group_id for window in windows for group_id in window) == [2, 3, 4, 5, 6, 7]
    assert again.dock.ledger_counts()["trained"] == 7
    assert again.dock.ledger_counts()["dropped"] == {"filtered": 1}


def test_a_batch_that_was_being_trained_is_in_flight_in_a_snapshot(make_rig):
    rig = make_rig(batch_groups=2)
    rig.make_ready()
    batch = rig.take_batch()
    rig.client.drop([0], "invalid:nan", batch.lease)
    snapshot = rig.client.snapshot()
    assert (snapshot["version"], snapshot["in_flight"]) == (0, [[1, 0]])
    again = make_rig(batch_groups=2)
    assert again.client.restore(snapshot) == [1]
    assert again.dock.num_admissible() == 1


def test_a_snapshot_out_of_order_is_refused_by_an_ordered_dock(make_rig):
    rig = make_rig(batch_groups=2, staleness=1)
    rig.admit(4)
    batch = rig.start(4)
    rows = [sample for sample in batch.ids if sample.group_id >= 2]
    rig.client.put(rows, {"response": [np.arange(1)] * 4, "reward": [1.0] * 4}, batch.lease)
    taken = rig.take_batch()
    assert rig.client.trained(taken.lease) == [2, 3]
    snapshot = rig.client.snapshot()
    with pytest.raises(UserError, match="does not go on in order"):
        make_rig(batch_groups=2, staleness=1, ordered=True).client.restore(snapshot)
    other = make_rig(batch_groups=2, staleness=1)
    assert other.client.restore(snapshot) == [0, 1]


@pytest.mark.parametrize("batch_groups", [1, 2, 3, 5])
def test_a_snapshot_may_go_on_with_another_batch_size(make_rig, batch_groups):
    rig = make_rig(batch_groups=4, staleness=1)
    rig.admit()
    batch = rig.start(8)
    rig.client.drop([0, 2, 4, 6], "filtered", batch.lease)
    snapshot = rig.client.snapshot()
    other = make_rig(batch_groups=batch_groups, staleness=1)
    again = other.client.restore(snapshot)
    consumed = 0
    other.next_id = 8
    for _ in range(20):
        room = other.dock.num_admissible()
        now, again = again[:room], again[room:]
        other.client.admit([(group_id, 2, "train", {"prompt": np.full(3, group_id, np.int32)}) for group_id in now])
        other.make_ready()
        consumed += len(other.train())
    assert not again
    assert sorted(other.trained)[:4] == [1, 3, 5, 7]
    assert len(set(other.trained)) == len(other.trained)
    assert consumed == 20 * batch_groups


def test_attempts_are_remembered(make_rig):
    rig = make_rig(batch_groups=1)
    snapshot = rig.client.snapshot()
    snapshot["in_flight"] = [[0, 3]]
    again = make_rig(batch_groups=1)
    again.client.restore(snapshot)
    again.admit()
    batch = again.start()
    assert batch.ids == [SampleId(0, 0, 3), SampleId(0, 1, 3)]
    again.generate(batch)
    again.score()
    assert again.train() == [0]


def test_a_kind_that_is_named_twice_is_one(make_rig):
    rig = make_rig(batch_groups=4)
    rig.admit(4)
    batch = rig.client.take("rollout", max_groups=4, version=0, kinds=("train", "train"))
    assert batch is not None
    assert len(batch.groups) == 4
    rig.generate(batch)
    rows = rig.client.take_rows("score", max_rows=100, kinds=("train", "train"))
    assert rows is not None
    assert len(rows.ids) == 8
    rig.clock.now = 100.0
    assert [lease.lease for lease in rig.dock.expire()] == [rows.lease]
    assert rig.score() == 8


def test_more_rows_than_a_message_may_bring_are_refused_before_they_are_remembered(make_rig):
    rig = make_rig(batch_groups=4)
    with pytest.raises(ValueError, match="rows were to be admitted at once"):
        rig.client.admit([(0, 1 << 40, "train", {"prompt": np.zeros(3)})])
    rig.client.admit([(0, 2, "train", {"prompt": np.zeros(3)})])
