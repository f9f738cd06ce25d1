"""Identities as an array say the same as a list of them would."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tranship.dock import rows as module
from tranship.dock.rows import GroupRun, Rows
from tranship.types import SampleId

SAMPLES = st.builds(SampleId, st.integers(-1, 3), st.integers(-1, 4), st.integers(0, 1))
FAR = st.builds(SampleId, *[st.integers(-(2**63), 2**63 - 1)] * 3)


@pytest.fixture(params=[1, 1 << 30], ids=["array", "list"], autouse=True, scope="module")
def way(request):
    """Both ways of looking at rows, whatever their number."""
    before, module._MANY = module._MANY, request.param
    yield
    module._MANY = before


@given(st.lists(SAMPLES | FAR, max_size=20))
def test_rows_are_a_sequence_of_their_identities(samples):
    rows = Rows.of(samples)
    assert list(rows) == samples
    assert rows == samples
    assert rows == Rows.of(rows)
    assert len(rows) == len(samples)
    assert rows[1:3] == samples[1:3]
    assert all(rows[i] == sample and type(rows[i]) is SampleId for i, sample in enumerate(samples))
    assert rows != [*samples, SampleId(9, 9)]


@given(st.lists(SAMPLES | FAR, max_size=20), st.booleans())
def test_a_sample_that_stands_twice_is_found(samples, ordered):
    samples = sorted(samples) if ordered else samples
    assert Rows.of(samples).has_repeats == (len({sample[:2] for sample in samples}) != len(samples))


@given(st.lists(st.tuples(SAMPLES, st.integers(1, 4)), max_size=8))
def test_runs_are_the_longest_that_there_are(starts):
    samples = [SampleId(one.group_id, one.sample_index + i, one.attempt) for one, n in starts for i in range(n)]
    runs = Rows.of(samples).group_runs()
    told = [SampleId(run.group_id, run.sample_index + i, run.attempt) for run in runs for i in range(run.count)]
    assert told == samples
    assert [run.first for run in runs] == [sum(run.count for run in runs[:i]) for i in range(len(runs))]
    for one, other in pairwise(runs):
        goes_on = (other.group_id, other.attempt) == (one.group_id, one.attempt)
        assert not (goes_on and other.sample_index == one.sample_index + one.count)


def test_the_runs_of_two_groups():
    samples = [SampleId(5, 0), SampleId(5, 1), SampleId(6, 0), SampleId(6, 2), SampleId(6, 3, 1)]
    assert Rows.of(samples).group_runs() == [
        GroupRun(0, 2, 5, 0, 0),
        GroupRun(2, 1, 6, 0, 0),
        GroupRun(3, 1, 6, 2, 0),
        GroupRun(4, 1, 6, 3, 1),
    ]
