"""Scored, masked, or invalid with a reason: nothing becomes a zero by accident."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tranship.rewards.scoring import MAX_REASON, invalid, to_score
from tranship.types import Score


@pytest.mark.parametrize(
    ("result", "value"),
    [
        (1, 1.0),
        (0.25, 0.25),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.array(2.0), 2.0),
        (2**70, 2.0**70),
    ],
)
def test_numbers_are_scored(result: object, value: float):
    score = to_score(result)
    assert score == Score("scored", value)
    assert type(score.value) is float


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (None, "returned None"),
        (math.nan, "returned nan"),
        (math.inf, "returned inf"),
        (np.float32("nan"), "returned nan"),
        ("1.0", "returned str '1.0', not a number"),
        ([1.0], "returned list [1.0], not a number"),
        (np.array([1.0, 2.0]), "returned ndarray"),
        (1 + 2j, "returned complex"),
        (10**400, "returned inf"),
        ({}, "returned a dict without 'score' (keys: none)"),
        ({"acc": 1}, "returned a dict without 'score' (keys: acc)"),
        ({"score": None}, "returned None"),
        ({"score": "1"}, "returned str"),
        ({"score": math.nan, "acc": 0}, "returned nan"),
    ],
)
def test_everything_else_is_invalid_with_its_reason(result: object, reason: str):
    score = to_score(result)
    assert (score.status, score.value) == ("invalid", None)
    assert score.reason.startswith(reason)


def test_a_dict_keeps_its_further_entries():
    result = {
        "score": np.float64(1),
        "well_formed": np.bool_(True),
        "n": np.int32(3),
        "note": "x",
        "o": {1},
        "l": (1, 2),
    }
    score = to_score(result)
    assert score.value == 1.0
    assert score.extra == {"well_formed": True, "n": 3, "note": "x", "o": "{1}", "l": [1, 2]}
    assert to_score({"score": 1, "big": 2**64}).extra == {"big": float(2**64)}


def test_masked_on_purpose():
    assert to_score({"masked": True, "why": "too long", "score": 1}) == Score("masked", extra={"why": "too long"})
    assert to_score({"masked": False, "score": 1}) == Score("scored", 1.0)


@given(st.text())
def test_a_reason_is_one_short_line_and_never_empty(text: str):
    reason = invalid(text).reason
    assert 0 < len(reason) <= MAX_REASON
    assert len(reason.splitlines()) == 1


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda c: st.lists(c) | st.dictionaries(st.text(), c),
    )
)
def test_any_result_gives_some_score(result: object):
    score = to_score(result)
    assert (score.status == "scored") == (score.value is not None)
    assert score.value is None or math.isfinite(score.value)
