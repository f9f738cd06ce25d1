"""What each of several ranks holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tranship.layouts import Share, cut, scaled


@given(st.integers(1, 8), st.integers(1, 40))
def test_parts_are_equal_and_cover_or_are_shared_by_neighbours(size, count):
    shares = [Share(rank, size) for rank in range(size)]
    if not shares[0].divides(count):
        with pytest.raises(AssertionError):
            shares[0].part(count)
        return
    held = [list(range(*share.part(count))) for share in shares]
    assert sorted({thing for part in held for thing in part}) == list(range(count))
    assert {len(part) for part in held} == {max(1, count // size)}
    assert held == sorted(held)
    if count >= size:
        assert [thing for part in held for thing in part] == list(range(count))


@given(st.integers(1, 8), st.integers(1, 40))
def test_stretches_follow_each_other(size, extent):
    stretches = [Share(rank, size).stretch(extent) for rank in range(size)]
    assert [thing for stretch in stretches for thing in range(*stretch)] == list(range(extent))
    assert all(stop - start <= Share(0, size).step(extent) for start, stop in stretches)


def test_boxes():
    assert cut((6, 4), 0, scaled(Share(1, 3).part(3), 2)) == ((2, 4), (0, 4))
    assert cut((6, 4), 1, Share(0, 2).part(4)) == ((0, 6), (0, 2))
    assert Share().part(5) == (0, 5)
