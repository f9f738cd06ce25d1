"""The stream gives each row once an epoch, in a mixture each part's rows once an epoch of the part's own, and can be
entered anywhere."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tranship.data.stream import PromptStream, StreamPart
from tranship.types import Prompt


def prompts(count: int) -> list[Prompt]:
    return [Prompt(index, np.array([index], np.int32), str(index), "s") for index in range(count)]


@settings(deadline=None, max_examples=60)
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


@settings(deadline=None, max_examples=60)
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


def parts(sizes: list[int], weights: list[float]) -> list[StreamPart]:
    made, first = [], 0
    for size, weight in zip(sizes, weights, strict=True):
        made.append(StreamPart([Prompt(first + i, np.array([i], np.int32), "", "s") for i in range(size)], weight))
        first += size
    return made


MIXTURES = st.lists(
    st.tuples(st.integers(1, 9), st.one_of(st.floats(1e-3, 1e3), st.sampled_from([1.0, 0.1, 0.3, 2.0]))),
    min_size=1,
    max_size=4,
).map(lambda pairs: ([size for size, _ in pairs], [weight for _, weight in pairs]))


@settings(deadline=None, max_examples=60)
@given(mixture=MIXTURES, seed=st.integers(0, 99), shuffle=st.booleans())
def test_each_part_gives_each_row_once_an_epoch_of_its_own(
    mixture: tuple[list[int], list[float]], seed: int, shuffle: bool
):
    taken = [prompt.index for _, prompt in PromptStream(parts(*mixture), seed, shuffle).take(120)]
    first = 0
    for size in mixture[0]:
        rows = [index - first for index in taken if first <= index < first + size]
        for start in range(0, len(rows) - size + 1, size):
            assert sorted(rows[start : start + size]) == list(range(size))
            assert shuffle or rows[start : start + size] == list(range(size))
        rest = rows[len(rows) - len(rows) % size :]
        assert len(set(rest)) == len(rest)
        first += size


@settings(deadline=None, max_examples=60)
@given(mixture=MIXTURES, position=st.integers(0, 200))
def test_each_part_has_its_share_at_every_moment(mixture: tuple[list[int], list[float]], position: int):
    sizes, weights = mixture
    taken = [prompt.index for _, prompt in PromptStream(parts(*mixture), 0, True).take(position)]
    bounds = np.cumsum([0, *sizes])
    for part, weight in enumerate(weights):
        count = sum(bounds[part] <= index < bounds[part + 1] for index in taken)
        assert abs(count - position * weight / sum(weights)) < len(sizes)


@settings(deadline=None, max_examples=60)
@given(mixture=MIXTURES, position=st.integers(0, 10**12), seed=st.integers(0, 9))
def test_a_mixture_is_entered_anywhere(mixture: tuple[list[int], list[float]], position: int, seed: int):
    stream = PromptStream(parts(*mixture), seed, True, position=position)
    walked = [(group_id, prompt.index) for group_id, prompt in stream.take(7)]
    other = PromptStream(parts(*mixture), seed, True)
    # From the end, so that what one epoch leaves behind does not help the next.
    assert [(g, other.at(g).index) for g in reversed(range(position, position + 7))] == walked[::-1]


@settings(deadline=None, max_examples=60)
@given(mixture=MIXTURES.filter(lambda mixture: max(mixture[1]) / min(mixture[1]) < 50), epochs=st.integers(1, 3))
def test_a_mixture_ends_when_every_part_was_given_so_often(mixture: tuple[list[int], list[float]], epochs: int):
    sizes, _ = mixture
    stream = PromptStream(parts(*mixture), 0, True, epochs=epochs)
    counts = Counter(prompt.index for _, prompt in stream.take(10**5))
    assert (stream.num_left, stream.epoch) == (0, epochs)
    assert min(counts[index] for index in range(sum(sizes))) == epochs
    if len({size / weight for size, weight in zip(*mixture, strict=True)}) == 1 == len(sizes):
        assert set(counts.values()) == {epochs}


def test_weights_in_proportion_to_rows_make_whole_epochs():
    stream = PromptStream(parts([2, 4, 6], [1.0, 2.0, 3.0]), 0, True)
    for epoch in range(3):
        assert stream.epoch == epoch
        assert sorted(prompt.index for _, prompt in stream.take(12)) == list(range(12))


def test_the_pattern_of_a_mixture_and_its_orders_never_change():
    taken = [prompt.index for _, prompt in PromptStream(parts([3, 2, 2], [0.5, 0.25, 0.25]), 5, True).take(14)]
    assert [0 if index < 3 else 1 if index < 5 else 2 for index in taken[:8]] == [0, 1, 0, 2, 0, 1, 0, 2]
    assert taken == [2, 3, 1, 5, 0, 4, 1, 6, 0, 4, 2, 5, 2, 3]


def test_parts_of_one_length_are_in_orders_of_their_own():
    taken = [prompt.index for _, prompt in PromptStream(parts([9, 9], [1.0, 1.0]), 0, True).take(18)]
    assert [index for index in taken if index < 9] != [index - 9 for index in taken if index >= 9]


@pytest.mark.parametrize(("num_rows", "batch"), [(5, 3), (5, 4), (3, 8), (4, 4), (1, 2)])
def test_batches_are_full_and_no_row_waits_for_a_batch_that_fits(num_rows: int, batch: int):
    stream = PromptStream(prompts(num_rows), 0, True)
    taken = [stream.take(batch) for _ in range(num_rows)]
    assert all(len(entries) == batch for entries in taken)
    counts = Counter(prompt.index for entries in taken for _, prompt in entries)
    assert set(counts.values()) == {batch}
    last = PromptStream(prompts(num_rows), 0, True, epochs=1)
    sizes = [len(last.take(batch)) for _ in range(4)]
    assert sum(sizes) == num_rows
    assert sizes[-1] == 0 or num_rows > 3 * batch
