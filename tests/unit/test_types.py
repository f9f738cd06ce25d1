"""Words that every floor shares."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tranship.types import reason_class


@pytest.mark.parametrize(
    ("reason", "counted_as"),
    [
        ("ValueError: cannot parse 'It is 7'", "ValueError"),
        ("format: ValueError: cannot parse: 7", "format: ValueError"),
        ("json.JSONDecodeError: Expecting value", "json.JSONDecodeError"),
        ("returned str 'seven, perhaps', not a number", "returned str, not a number"),
        ("returned a dict without 'score' (keys: a, b)", "returned a dict without"),
        ("timed out after 2 s", "timed out after 2 s"),
        ("the reward process was killed by signal SIGKILL", "the reward process was killed by signal SIGKILL"),
        ("", "unknown"),
        ("'all of it is quoted'", "unknown"),
    ],
)
def test_reasons_are_counted_by_what_samples_have_in_common(reason: str, counted_as: str) -> None:
    assert reason_class(reason) == counted_as


@given(st.text(max_size=300))
def test_a_class_is_short_and_never_empty(reason: str) -> None:
    assert 0 < len(reason_class(reason)) <= 80
