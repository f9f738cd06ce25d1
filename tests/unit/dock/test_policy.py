from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tranship.dock.policy import earliest_room, feasible, room_at

DEADLINES = st.lists(st.integers(0, 12), max_size=24)


def by_schedule(deadlines: list[int], version: int, batch: int) -> bool:
    """Earliest deadline first, `batch` at a time from `version` on: does everybody make it?"""
    return all(version + place // batch <= due for place, due in enumerate(sorted(deadlines)))


@pytest.mark.parametrize(
    ("deadlines", "version", "batch", "wanted"),
    [
        ([], 5, 1, True),
        ([4], 5, 1, False),
        ([5, 5], 5, 1, False),
        ([5, 6, 7], 5, 1, True),
        ([6, 6, 6, 6], 5, 2, True),
        ([6, 6, 6, 6, 6], 5, 2, False),
        ([5, 7, 7, 7], 6, 2, False),
    ],
)
def test_feasible_by_hand(deadlines, version, batch, wanted):
    assert feasible(deadlines, version, batch) is wanted


@settings(deadline=None, max_examples=300)
@given(DEADLINES, st.integers(0, 6), st.integers(1, 4))
def test_feasible_means_that_a_schedule_exists(deadlines, version, batch):
    assert feasible(deadlines, version, batch) == by_schedule(deadlines, version, batch)


@settings(deadline=None, max_examples=300)
@given(DEADLINES, st.integers(0, 6), st.integers(1, 4), st.integers(0, 14))
def test_room_is_exactly_how_many_more_fit(deadlines, version, batch, deadline):
    if not feasible(deadlines, version, batch):
        return
    room = room_at(Counter(deadlines), deadline, version, batch)
    assert feasible([*deadlines, *[deadline] * room], version, batch)
    assert not feasible([*deadlines, *[deadline] * (room + 1)], version, batch)


@settings(deadline=None, max_examples=200)
@given(DEADLINES, st.integers(0, 6), st.integers(1, 4))
def test_the_earliest_room_is_the_first_deadline_that_fits(deadlines, version, batch):
    if not feasible(deadlines, version, batch):
        return
    found = earliest_room(Counter(deadlines), version, batch)
    assert feasible([*deadlines, found], version, batch)
    assert not any(feasible([*deadlines, other], version, batch) for other in range(version, found))


@settings(deadline=None, max_examples=200)
@given(DEADLINES, st.integers(0, 6), st.integers(1, 4))
def test_after_a_batch_of_the_earliest_the_rest_is_still_feasible(deadlines, version, batch):
    if not feasible(deadlines, version, batch):
        return
    assert feasible(sorted(deadlines)[batch:], version + 1, batch)
