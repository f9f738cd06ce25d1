import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tranship.algorithms import ADVANTAGES
from tranship.algorithms.advantages import grpo, reinforce, rloo
from tranship.lookup import resolve


def estimator(name):
    return resolve(name, ADVANTAGES, "algorithm.advantage")


def _calls():
    for name in ADVANTAGES:
        scaled = "scale_by_std" in inspect.signature(estimator(name)).parameters
        yield from ((name, {"scale_by_std": scale}) for scale in (False, True)) if scaled else [(name, {})]


CALLS = list(_calls())
# They compare samples with each other; reinforce does not.
COMPARING = [(name, args) for name, args in CALLS if name != "reinforce"]
IDS = np.array([0, 1, 0, 2, 0, 1])
REWARDS = np.array([1, 5, 0, 7, 1, 5], dtype=np.float32)

rewards_and_ids = st.lists(st.tuples(st.floats(-10, 10, width=32), st.integers(0, 3)), min_size=1, max_size=24).map(
    lambda rows: (np.array([r for r, _ in rows]), np.array([g for _, g in rows]))
)


def test_groups_are_told_apart_by_id():
    np.testing.assert_allclose(grpo(REWARDS, IDS, scale_by_std=False), [1 / 3, 0, -2 / 3, 0, 1 / 3, 0], atol=1e-5)
    np.testing.assert_allclose(grpo(REWARDS, IDS), [0.57735, 0, -1.154701, 0, 0.57735, 0], atol=1e-5)


@pytest.mark.parametrize(("name", "args"), CALLS)
@given(rows=rewards_and_ids, data=st.data())
def test_permuting_rows_permutes_advantages_and_nothing_else(name, args, rows, data):
    rewards, ids = rows
    order = np.array(data.draw(st.permutations(range(len(rewards)))))
    plain = estimator(name)(rewards, ids, **args)
    assert plain.dtype == np.float32
    np.testing.assert_array_equal(estimator(name)(rewards[order], ids[order], **args), plain[order])


@pytest.mark.parametrize(("name", "args"), CALLS)
@given(rows=rewards_and_ids)
def test_a_group_alone_gives_what_it_gives_among_others(name, args, rows):
    rewards, ids = rows
    together = estimator(name)(rewards, ids, **args)
    for group in np.unique(ids):
        here = ids == group
        np.testing.assert_array_equal(estimator(name)(rewards[here], ids[here], **args), together[here])


@pytest.mark.parametrize(("name", "args"), COMPARING)
@pytest.mark.parametrize("value", [0.0, 0.1, 0.35, 0.95, 1 / 3, -7.7])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_equal_rewards_give_exactly_zero(name, args, value, dtype, size):
    result = estimator(name)(np.full(size, value, dtype=dtype), np.zeros(size, dtype=np.int64), **args)
    assert (result == 0).all()


def test_leave_one_out_compares_with_the_others():
    np.testing.assert_allclose(rloo(np.array([1.0, 0, 0, 0]), np.zeros(4)), [1, -1 / 3, -1 / 3, -1 / 3], atol=1e-6)


def test_leave_one_out_is_unscaled_where_the_others_do_not_vary():
    result = rloo(np.array([0.0] + [0.95] * 7), np.zeros(8), scale_by_std=True)
    assert result[0] == pytest.approx(-0.95, abs=1e-6)
    others = np.array([0.0] + [0.95] * 6)
    assert result[1] == pytest.approx((0.95 - others.mean()) / others.std(ddof=1), abs=1e-5)


@pytest.mark.parametrize(("name", "args"), CALLS)
@given(
    base=st.floats(-1e3, 1e3),
    rewards=st.lists(st.floats(0, 1) | st.floats(0, 1e-6) | st.just(0.95), min_size=1, max_size=40),
)
def test_rewards_of_spread_one_never_explode(name, args, base, rewards):
    shift = 0.0 if name == "reinforce" else base
    result = estimator(name)(shift + np.array(rewards), np.zeros(len(rewards)), **args)
    assert (np.abs(result) <= 100 * (1 + 1e-6)).all()


@pytest.mark.parametrize(("name", "args"), CALLS)
def test_one_right_answer_in_very_many_does_not_explode(name, args):
    size = 2_000 if name == "rloo" else 100_000
    rewards = np.zeros(size)
    rewards[0] = 1
    assert np.abs(estimator(name)(rewards, np.zeros(size), **args)).max() <= 100


@pytest.mark.parametrize(("name", "args"), CALLS)
def test_a_nan_reward_stays_visible_and_in_its_group(name, args):
    result = estimator(name)(np.array([1.0, np.nan, 0, 1, 0]), np.array([0, 0, 0, 1, 1]), **args)
    assert np.isnan(result[:3]).any()
    assert np.isfinite(result[3:]).all()
    assert np.isnan(estimator(name)(np.array([np.nan]), np.array([4]), **args)).all()


def test_without_a_baseline_a_sample_is_worth_its_reward():
    np.testing.assert_array_equal(reinforce(REWARDS, IDS), REWARDS)
    assert reinforce(np.array([0.25]), np.array([3])).tolist() == [0.25]
