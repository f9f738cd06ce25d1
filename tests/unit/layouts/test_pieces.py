"""Boxes: what they share, and what is left of one without another."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tranship.layouts import box_size, full_box, intersect, subtract


def region(tensor, box):
    return tensor[tuple(slice(start, stop) for start, stop in box)]


@st.composite
def boxes(draw):
    box = tuple((start, start + draw(st.integers(1, 4))) for start in draw(st.lists(st.integers(0, 3), max_size=3)))
    cut = tuple((start, start + draw(st.integers(1, 4))) for start in draw(st.tuples(*[st.integers(0, 5)] * len(box))))
    return box, cut


@given(boxes())
def test_a_box_less_a_cut_is_covered_without_overlap(pair):
    box, cut = pair
    grid = torch.zeros([12] * len(box))
    for rest in subtract(box, cut):
        assert intersect(rest, cut) is None
        region(grid, rest).add_(1)
    assert grid.max() <= 1
    shared = intersect(box, cut)
    assert grid.sum() == box_size(box) - (0 if shared is None else box_size(shared))


@given(boxes())
def test_what_two_boxes_share_is_what_both_cover(pair):
    a, b = pair
    grids = []
    for box in pair:
        grids.append(torch.zeros([12] * len(a), dtype=torch.bool))
        region(grids[-1], box).fill_(True)
    both = grids[0] & grids[1]
    shared = intersect(a, b)
    assert (shared is None) == (not both.any())
    if shared is not None:
        assert region(both, shared).all()
        assert int(both.sum()) == box_size(shared)


def test_a_scalar_has_one_element():
    assert full_box(()) == ()
    assert box_size(()) == 1
    assert intersect((), ()) == ()
    assert subtract((), ()) == []


def test_a_full_box_covers_its_tensor():
    assert full_box((3, 4)) == ((0, 3), (0, 4))
    assert box_size(full_box((3, 4))) == 12
    assert intersect(((0, 3), (0, 4)), ((3, 5), (0, 4))) is None
