import json

import pytest

from tranship.dock import Ledger


def test_each_group_has_one_outcome():
    ledger = Ledger()
    for group_id in range(6):
        ledger.admit(group_id)
    ledger.train(3)
    ledger.train(0)
    ledger.drop(1, "filtered")
    ledger.drop(2, "invalid:no digits")
    ledger.drop(4, "too_stale")
    outcomes = [ledger.outcome(group_id) for group_id in range(7)]
    assert outcomes == ["trained", "filtered", "invalid:no digits", "trained", "too_stale", "in flight", None]
    assert (ledger.admitted, ledger.trained, ledger.filtered, ledger.invalid) == (6, 2, 1, 1)
    assert (ledger.too_stale, ledger.in_flight) == (1, 1)
    assert str(ledger) == "6 admitted = 2 trained, 1 filtered, 1 invalid:no digits, 1 too_stale, 1 in flight"


def test_nothing_counts_twice():
    ledger = Ledger()
    ledger.admit(0)
    with pytest.raises(AssertionError, match="in flight already"):
        ledger.admit(0)
    ledger.train(0)
    for again in (lambda: ledger.train(0), lambda: ledger.drop(0, "filtered"), lambda: ledger.admit(0)):
        with pytest.raises(AssertionError):
            again()


def test_a_ledger_that_does_not_balance_is_noticed():
    ledger = Ledger()
    ledger.admit(0)
    ledger.trained += 1
    with pytest.raises(AssertionError, match="does not balance"):
        ledger.check()


def test_a_snapshot_goes_on_without_what_was_in_flight():
    ledger = Ledger()
    for group_id in range(5):
        ledger.admit(group_id)
    ledger.train(4)
    ledger.drop(0, "filtered")
    copy = Ledger()
    copy.restore(json.loads(json.dumps(ledger.snapshot())))
    assert (copy.admitted, copy.trained, copy.filtered, copy.in_flight) == (2, 1, 1, 0)
    assert [copy.outcome(group_id) for group_id in range(5)] == ["filtered", None, None, None, "trained"]
    copy.admit(1)
    with pytest.raises(AssertionError):
        copy.admit(4)


def test_the_record_of_trained_groups_stays_small():
    ledger = Ledger()
    for group_id in range(5000):
        ledger.admit(group_id)
        if group_id % 8 == 7:
            for done in range(group_id, group_id - 8, -1):
                ledger.train(done)
    assert len(ledger.snapshot()["above"]) == 0
    assert ledger.trained == 5000
