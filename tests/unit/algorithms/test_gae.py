import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tranship.algorithms import TOKEN_ADVANTAGES
from tranship.algorithms.gae import gae
from tranship.lookup import resolve

every = pytest.mark.parametrize("name", TOKEN_ADVANTAGES)
few = settings(max_examples=40, deadline=None)
JUNK = [float("nan"), float("inf"), -float("inf"), 1e30]


def estimate(name, rewards, values, mask, gamma=0.9, lam=0.8):
    return resolve(name, TOKEN_ADVANTAGES, "algorithm.advantage")(rewards, values, mask, gamma=gamma, lam=lam)


def drawn(seed, tokens):
    generator = np.random.default_rng(seed)
    return generator.normal(size=tokens), generator.normal(size=tokens), generator.random(tokens) < 0.6


def test_gae_of_a_finished_response():
    advantages, returns = gae(np.array([0, 0, 1.0]), np.array([0.5, 0.6, 0.7]), np.ones(3, bool), gamma=0.9, lam=0.8)
    np.testing.assert_allclose(advantages, [0.21712, 0.246, 0.3], atol=1e-5)
    np.testing.assert_allclose(returns, [0.71712, 0.846, 1.0], atol=1e-5)


def test_gae_does_not_look_at_what_follows_the_end():
    mask = np.array([True, True, False])
    advantages, returns = gae(np.array([0, 1.0, 0]), np.array([0, 0, 100.0]), mask, gamma=1.0, lam=0.95)
    np.testing.assert_allclose(advantages, [0.95, 1, 0], atol=1e-6)
    np.testing.assert_allclose(returns, [0.95, 1, 0], atol=1e-6)


def test_gae_skips_the_tokens_between_two_turns():
    mask = np.array([True, False, False, True, True])
    rewards, values = np.array([0, 7.0, 7, 0, 1]), np.array([0.5, 99, 99, 0.6, 0.7])
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.8)
    np.testing.assert_allclose(advantages, [0.21712, 0, 0, 0.246, 0.3], atol=1e-5)
    np.testing.assert_allclose(returns, [0.71712, 0, 0, 0.846, 1.0], atol=1e-5)


@few
@given(seed=st.integers(0, 2**31), tokens=st.integers(1, 12), gamma=st.floats(0.1, 1), lam=st.floats(0, 1))
def test_gae_is_the_weighted_sum_of_temporal_differences(seed, tokens, gamma, lam):
    rewards, values, mask = drawn(seed, tokens)
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    r, v = rewards[mask], values[mask]
    following = np.append(v[1:], 0.0)[: len(v)]
    differences = r + gamma * following - v
    expected = [sum((gamma * lam) ** (k - t) * differences[k] for k in range(t, len(v))) for t in range(len(v))]
    np.testing.assert_allclose(advantages[mask], expected, atol=1e-5)
    np.testing.assert_allclose(returns[mask], expected + v, atol=1e-5)


@every
@few
@given(seed=st.integers(0, 2**31), tokens=st.integers(1, 12), junk=st.tuples(*[st.sampled_from(JUNK)] * 2))
def test_masked_positions_never_matter(name, seed, tokens, junk):
    rewards, values, mask = drawn(seed, tokens)
    advantages, returns = estimate(name, rewards, values, mask)
    others = estimate(name, np.where(mask, rewards, junk[0]), np.where(mask, values, junk[1]), mask)
    np.testing.assert_array_equal(advantages, others[0])
    np.testing.assert_array_equal(returns, others[1])
    assert advantages.dtype == returns.dtype == np.float32
    assert (advantages[~mask] == 0).all()
    assert (returns[~mask] == 0).all()


@every
def test_a_nan_at_a_valid_position_is_never_hidden(name):
    rewards, values, mask = drawn(3, 6)
    mask[2] = True
    for column in (rewards, values):
        kept, column[2] = column[2], np.nan
        assert np.isnan(estimate(name, rewards, values, mask)[0]).any()
        column[2] = kept


@every
def test_a_response_without_unmasked_tokens_is_worth_nothing(name):
    nothing = np.full(4, np.nan)
    advantages, returns = estimate(name, nothing, nothing, np.zeros(4, bool))
    assert (advantages == 0).all()
    assert (returns == 0).all()
