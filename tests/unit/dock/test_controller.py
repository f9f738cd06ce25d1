import time

import pytest

from tranship.dock.controller import Controller
from tranship.dock.messages import StageNeeds


def always(key) -> bool:
    return True


def ready_controller(count: int) -> Controller:
    controller = Controller(StageNeeds("s", ("a",)))
    for group_id in range(count):
        controller.admit(group_id, 4, "train")
        assert controller.arrived(group_id)
    return controller


def test_a_group_is_ready_once_all_columns_are_complete():
    controller = Controller(StageNeeds("s", ("a", "b", "a")))
    assert controller.admit(1, 4, "train") == []
    assert not controller.arrived(1)
    assert controller.pick("train", 9, always) == ([], False)
    assert controller.arrived(1)
    assert controller.pick("train", 9, always) == ([1], False)
    assert not controller.arrived(1)


def test_a_stage_that_reads_nothing_is_ready_at_once():
    assert Controller(StageNeeds("s", ())).admit(1, 2, "val") == [1]
    assert Controller(StageNeeds("s", (), "row")).admit(1, 2, "val") == [(1, 0), (1, 1)]


def test_kinds_do_not_mix():
    controller = ready_controller(1)
    controller.admit(-5, 1, "val")
    controller.arrived(-5)
    assert controller.pick("val", 9, always) == ([-5], False)
    assert controller.pick("train", 9, always) == ([0], False)


def test_what_comes_back_is_first_and_in_order():
    controller = ready_controller(6)
    controller.lend([0, 1, 2, 3], lease=1)
    controller.done(1)
    controller.put_back([0, 2, 3])
    assert controller.pick("train", 9, always)[0] == [0, 2, 3, 4, 5]
    controller.lend([0], lease=2)
    controller.put_back([0])
    assert controller.pick("train", 2, always)[0] == [0, 2]


def test_a_refused_new_key_ends_the_search_and_a_refused_returned_one_does_not():
    controller = ready_controller(5)
    controller.lend([0, 1], lease=1)
    controller.put_back([0, 1])
    asked = []

    def only_odd(key) -> bool:
        asked.append(key)
        return key % 2 == 1

    assert controller.pick("train", 9, only_odd) == ([1], True)
    assert asked == [0, 1, 2]


def test_forget_tells_who_had_it():
    controller = Controller(StageNeeds("s", ("a",), "row"))
    controller.admit(7, 4, "train")
    for index in range(3):
        controller.arrived((7, index))
    controller.lend([(7, 0)], lease=5)
    controller.lend([(7, 1)], lease=6)
    controller.done((7, 0))
    assert controller.forget(7) == {(7, 1): 6}
    assert controller.ready("train") == []
    assert not controller.arrived((7, 3))
    with pytest.raises(KeyError):
        controller.forget(7)


def test_a_take_costs_the_same_however_much_is_held():
    """A structural test with a wide margin: a scan over 200 times the rows would be far beyond it."""

    def seconds(count: int) -> float:
        controller = ready_controller(count)
        best = float("inf")
        for lease in range(5):
            start = time.perf_counter()
            for _ in range(40):
                keys, _ = controller.pick("train", 1, always)
                controller.lend(keys, lease)
                controller.put_back(keys)
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(40_000) < 20 * seconds(200)
