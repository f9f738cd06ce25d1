import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tranship.dock.window import Unfinished, Window


def resolved(window: Window, deadlines: dict[int, int | None]) -> None:
    for group_id, deadline in deadlines.items():
        window.num_unconsumed += 1
        window.move(group_id, None, deadline)
        window.resolve(group_id, deadline)


def test_the_earliest_deadlines_go_first_and_ties_go_by_id():
    window = Window(3, 2, ordered=False)
    resolved(window, {0: 2, 1: None, 2: 1, 3: 2, 4: 1})
    assert window.choose() == [2, 4, 0]
    assert window.choose() == [2, 4, 0]
    assert window.take([2, 4, 0]) == []
    assert window.choose() is None
    window.consume([])
    window.advance()
    assert window.choose() is None
    resolved(window, {5: 3})
    assert window.choose() == [3, 5, 1]


def test_a_changed_deadline_changes_the_order():
    window = Window(1, 2, ordered=False)
    resolved(window, {0: 0, 1: 1})
    window.move(0, 0, 2)
    assert window.choose() == [1]
    window.move(0, 2, None)
    assert window.choose() == [1]
    window.move(1, 1, None)
    assert window.choose() == [0]


def test_an_ordered_window_waits_for_its_own_ids():
    window = Window(2, 1, ordered=True)
    resolved(window, {1: 0, 2: 0, 3: 0})
    assert window.choose() is None
    resolved(window, {0: 0})
    assert window.choose() == [0, 1]
    assert window.is_safe([0, 1])


def test_a_dropped_group_keeps_its_place_and_one_without_gets_the_earliest():
    window = Window(1, 3, ordered=False)
    resolved(window, {0: 0, 1: 1})
    window.bury(1, 1)
    window.num_unconsumed += 1
    window.bury(2, None)
    assert window.tombstones == {1: 1, 2: 2}
    assert window.choose() == [0]


def test_a_version_does_not_begin_while_a_group_was_due_before():
    window = Window(1, 0, ordered=False)
    resolved(window, {0: 0, 1: 0})
    window.take([0])
    window.consume([])
    with pytest.raises(AssertionError, match="was due at version 0"):
        window.advance()


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=14),
)
def test_victims_are_enough_and_none_is_spared_that_is_older(batch, groups):
    """Some groups of a feasible set are finished: after a batch of them, without the victims, the rest is in time."""
    window = Window(batch, 4, ordered=False)
    unfinished = []
    for group_id, (deadline, is_done) in enumerate(groups):
        if not window.may_start(group_id, None, deadline):
            continue
        window.move(group_id, None, deadline)
        if is_done:
            window.resolve(group_id, deadline)
        else:
            unfinished.append(Unfinished(group_id, deadline))
    chosen = window.choose()
    if chosen is None:
        return
    victims = window.victims(chosen, unfinished)
    assert bool(victims) != window.is_safe(chosen)
    window.take(chosen)
    for victim in victims:
        window.move(victim.group_id, victim.deadline, None)
    for victim in victims:
        window.bury(victim.group_id, None)
        assert 1 <= window.tombstones[victim.group_id] <= 4
    window.consume([])
    window.advance()
    spared = [one for one in unfinished if one not in victims]
    assert all(
        (victim.deadline, victim.group_id) < (one.deadline, one.group_id) for victim in victims for one in spared
    )
