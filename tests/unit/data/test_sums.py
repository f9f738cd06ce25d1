"""Sums: what is held out is held out in both orders."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tranship.data.sums import sums
from tranship.types import UserError


def pairs(rows: list[dict]) -> list[tuple[int, int]]:
    return [(row["extra_info"]["a"], row["extra_info"]["b"]) for row in rows]


@given(low=st.integers(-5, 30), extent=st.integers(2, 12), data=st.data())
def test_training_and_validation_share_no_unordered_pair(low: int, extent: int, data: st.DataObject):
    high = low + extent - 1
    num_val = data.draw(st.integers(0, extent * (extent + 1) // 2 - 1))
    train, val = (pairs(sums(low, high, split, num_val)) for split in ("train", "val"))
    unordered = [tuple(sorted(pair)) for pair in val]
    assert len(val) == len(set(unordered)) == num_val
    assert not {tuple(sorted(pair)) for pair in train} & set(unordered)
    assert {tuple(sorted(pair)) for pair in train} | set(unordered) == {
        (a, b) for a in range(low, high + 1) for b in range(a, high + 1)
    }
    assert len(train) == len(set(train)) == extent**2 - sum(1 if a == b else 2 for a, b in unordered)


def test_rows_are_right_and_always_the_same():
    rows = sums(1, 20, "val", 64, suffix="Answer with just the number.")
    assert rows == sums(1, 20, "val", 64, suffix=" Answer with just the number.")
    for row in rows:
        a, b = row["extra_info"]["a"], row["extra_info"]["b"]
        assert row["prompt"] == [{"role": "user", "content": f"What is {a} + {b}? Answer with just the number."}]
        assert row["reward_model"] == {"style": "rule", "ground_truth": str(a + b)}
        assert row["data_source"] == "sums"
    assert any(a > b for a, b in pairs(rows))
    assert any(a < b for a, b in pairs(rows))
    # A run that continues next year must hold out the same pairs.
    assert pairs(rows)[:4] == [(20, 20), (6, 3), (13, 7), (17, 7)]


@pytest.mark.parametrize(
    "args", [{"low": 5, "high": 4}, {"split": "test"}, {"num_val": 210}, {"num_val": -1}, {"low": "1"}, {"high": 10**6}]
)
def test_bad_arguments_are_named(args: dict):
    with pytest.raises(UserError, match="sums: "):
        sums(**args)
