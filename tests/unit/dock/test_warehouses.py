"""The dock's books of other nodes' warehouses: who gets a slab, what a full file system and a lost node lead to."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tranship.dock import Dock, StageNeeds, StaleSlab
from tranship.dock.messages import Admission, BlockRef, Publish
from tranship.types import SampleId

SLAB = 1 << 20


@pytest.fixture
def make_dock() -> Callable[..., Dock]:
    def make(**rules: object) -> Dock:
        settings = {"batch_groups": 1, "staleness": 1, "lease_s": 60.0, "ordered": False, "refill": False, **rules}
        sizes = {"slab_bytes": SLAB, "capacity_bytes": 8 * SLAB, "shared": False}
        stages = [StageNeeds("rollout", ("prompt",)), StageNeeds("train", ("response",))]
        return Dock(stages, run_id="books", clock=lambda: 0.0, **sizes, **settings)  # type: ignore[arg-type]

    return make


def answer(dock: Dock, node: int, beat: int, error: str = "") -> list[int]:
    """A keeper does what it is asked to; returns the sizes of the slabs that it was to make."""
    chores = dock.chores(node, beat) or []
    dock.chores(node, beat + 1, [(chore.slab, error if chore.nbytes else "") for chore in chores])
    return [chore.nbytes for chore in chores]


def test_a_slab_is_there_once_the_keeper_has_made_it(make_dock):
    dock = make_dock()
    node = dock.open_warehouse("b", "/b", "tcp:127.0.0.1:1")
    assert dock.lease_slab("a", 100, None, node) is None
    assert dock.lease_slab("a", 100, None, node) is None
    assert answer(dock, node, 1) == [SLAB], "it was asked for once"
    lease = dock.lease_slab("a", 100, None, node)
    assert lease is not None
    assert lease.path == f"/b/{lease.slab}.slab"


def test_whoever_asks_first_has_it_and_the_other_one_gets_another(make_dock):
    dock = make_dock()
    node = dock.open_warehouse("b", "/b", "tcp:127.0.0.1:1")
    assert dock.lease_slab("a", 100, None, node) is None
    answer(dock, node, 1)
    assert dock.lease_slab("b", 100, None, node) is not None
    assert dock.lease_slab("a", 100, None, node) is None
    assert answer(dock, node, 3) == [SLAB]
    assert dock.lease_slab("a", 100, None, node) is not None


def test_a_larger_slab_than_the_one_that_was_made_is_made_too(make_dock):
    dock = make_dock()
    node = dock.open_warehouse("b", "/b", "tcp:127.0.0.1:1")
    dock.lease_slab("a", 100, None, node)
    answer(dock, node, 1)
    assert dock.lease_slab("a", 3 * SLAB, None, node) is None
    assert answer(dock, node, 3) == [4 * SLAB]
    assert dock.lease_slab("a", 3 * SLAB, None, node) is not None


@pytest.mark.parametrize("says", ["there is room", "a successor"])
def test_a_file_system_that_was_full_is_tried_again_when_its_keeper_says_so(make_dock, says):
    dock = make_dock()
    node = dock.open_warehouse("b", "/b", "tcp:127.0.0.1:1")
    dock.lease_slab("a", 100, None, node)
    (failed,) = dock.chores(node, 1)
    dock.chores(node, 2, [(failed.slab, "no room")])
    for beat in (3, 5):
        assert dock.lease_slab("a", 100, None, node) is None
        assert answer(dock, node, beat) == []
        assert dock.memory_use(node).refusal == "no room"
    before = dock.seq
    if says == "a successor":
        assert dock.open_warehouse("b", "/b", "tcp:127.0.0.1:2") == node
    else:
        dock.chores(node, 7, [(failed.slab, "")])
    assert dock.seq > before, "whoever waits asks again"
    assert dock.lease_slab("a", 100, None, node) is None
    assert answer(dock, node, 9) == [SLAB]
    assert dock.lease_slab("a", 100, None, node) is not None


def test_a_lost_node_is_refused_and_a_new_one_has_another_number(make_dock):
    dock = make_dock()
    node = dock.open_warehouse("b", "/b", "tcp:127.0.0.1:1")
    dock.lose_node(node)
    with pytest.raises(StaleSlab, match=f"the warehouse of node {node} is lost"):
        dock.lease_slab("a", 100, None, node)
    assert dock.place_after(node, "tcp:127.0.0.1:1") == ""
    assert dock.open_warehouse("b", "/b", "tcp:127.0.0.1:1") == node + 1


@pytest.mark.parametrize("rules", [{}, {"staleness": 0, "refill": True}, {"ordered": True}], ids=str)
@pytest.mark.parametrize("ends", ["trained", "given back"])
def test_a_batch_outlives_another_lease_on_a_group_that_was_lost_with_its_node(make_dock, rules, ends):
    dock = make_dock(**rules)
    node = dock.open_warehouse("b", "/b", "tcp:127.0.0.1:1")
    home = dock.lease_slab("coordinator", 64)
    dock.admit([Admission(0, 1, "train", BlockRef(home.slab, 1, 64, 64), ("prompt",))])
    dock.lease_slab("w", 64, None, node)
    answer(dock, node, 1)
    slab = dock.lease_slab("w", 64, None, node).slab
    first = dock.take("rollout", "w", max_groups=1, version=0)
    rows = [SampleId(0, 0, 0)]
    dock.publish(Publish("w", BlockRef(slab, 1, 64, 64), rows, ("response",), first.lease, 0))
    dock.release(first.lease)
    dock.take("rollout", "w2", max_groups=1, version=0)
    batch = dock.take_batch("train", "trainer", groups=1)
    dock.lose_node(node)
    dock.retire("w2")
    dock.check([batch.lease])
    if ends == "trained":
        assert dock.trained(batch.lease) == [0]
    else:
        dock.release(batch.lease)
        again = dock.take("rollout", "w3", max_groups=1, version=0)
        slab = dock.lease_slab("w3", 64).slab
        dock.publish(Publish("w3", BlockRef(slab, 1, 64, 64), rows, ("response",), again.lease, 0))
        dock.ack(again.lease)
        assert dock.trained(dock.take_batch("train", "trainer", groups=1).lease) == [0]
    dock.advance(1)
    assert dock.ledger_counts()["in_flight"] == 0
