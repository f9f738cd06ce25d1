"""The stream gives each row once an epoch, and can be entered anywhere."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tranship.data.stream import PromptStream
from tranship.types import Prompt


def prompts(count: int) -> list[Prompt]:
    return [Prompt(index, np.array([index], np.int32), str(index), "s") for index in range(count)]


@given(
    count=st.integers(1, 20),
    seed=st.integers(-(2**63), 2**64),
    shuffle=st.booleans(),
    cuts=st.lists(st.integers(0, 7), max_size=8),
)
def test_each_row_once_an_epoch_in_whatever_pieces_it_is_taken(count: int, seed: int, shuffle: bool, cuts: list[int]):
    whole = PromptStream(prompts(count), seed, shuffle).take(3 * count)
    assert [group_id for group_id, _ in whole] == list(range(3 * count))
    for epoch in range(3):
        rows = [prompt.index for _, prompt in whole[epoch * count : (epoch + 1) * count]]
        assert sorted(rows) == list(range(count))
        assert shuffle or rows == list(range(count))
    pieces = PromptStream(prompts(count), seed, shuffle)
    taken = [entry for cut in cuts for entry in pieces.take(cut)]
    assert pieces.position == len(taken) == sum(cuts)
    assert [(g, p.index) for g, p in taken] == [
        (g, p.index) for g, p in PromptStream(prompts(count), seed, shuffle).take(sum(cuts))
    ]


@given(count=st.integers(1, 20), position=st.integers(0, 100))
def test_a_position_is_all_that_a_resume_needs(count: int, position: int):
    expected = PromptStream(prompts(count), 7, True).take(position + 5)[position:]
    resumed = PromptStream(prompts(count), 7, True, position=position)
    assert [(g, p.index) for g, p in resumed.take(5)] == [(g, p.index) for g, p in expected]
    assert all(resumed.at(g).index == p.index for g, p in expected)
    resumed.seek(position)
    assert resumed.take(1)[0][0] == position


def test_epochs_end_the_stream():
    stream = PromptStream(prompts(3), 0, True, epochs=2)
    assert (len(stream.take(4)), stream.num_left, stream.epoch) == (4, 2, 1)
    assert [group_id for group_id, _ in stream.take(10)] == [4, 5]
    assert stream.take(1) == []
    assert PromptStream(prompts(3), 0, True).num_left is None


def test_orders_differ_by_seed_and_epoch_and_never_change():
    orders = [[p.index for _, p in PromptStream(prompts(8), seed, True).take(16)] for seed in (0, 1)]
    assert orders[0][:8] != orders[0][8:] != orders[1][8:]
    assert orders[0] != orders[1]
    assert orders[0][:8] == [0, 2, 1, 5, 4, 3, 6, 7]
