import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tranship.algorithms import ADVANTAGES, KL_ESTIMATORS, TOKEN_ADVANTAGES
from tranship.algorithms.estimate import GroupRewards, make_estimate, whiten
from tranship.config.schema import AlgorithmConfig, CriticConfig, KlConfig
from tranship.types import UserError

few = settings(max_examples=30, deadline=None)
IN_REWARD = KlConfig(coef=0.5, estimator="k1", where="reward")
CASES = {name: AlgorithmConfig(advantage=name) for name in ADVANTAGES}
CASES |= {name: AlgorithmConfig(name="ppo", advantage=name) for name in TOKEN_ADVANTAGES}
CASES |= {
    f"{name}-{kl}-in-reward": algorithm.model_copy(update={"kl": KlConfig(coef=0.5, estimator=kl, where="reward")})
    for name, algorithm in tuple(CASES.items())
    for kl in KL_ESTIMATORS
}
every = pytest.mark.parametrize("algorithm", CASES.values(), ids=CASES.keys())


def group(rewards, raw=None, masks=None, logprobs=None, ref=None, values=None):
    masks = masks or [np.ones(2, dtype=bool) for _ in rewards]
    zeros = [np.zeros(len(mask), dtype=np.float32) for mask in masks]
    return GroupRewards(
        group_id=7,
        rewards=np.array(rewards, dtype=np.float64),
        raw=np.array(rewards if raw is None else raw, dtype=np.float64),
        masks=masks,
        logprobs=logprobs or zeros,
        ref_logprobs=ref,
        values=values,
    )


def drawn(seed, samples):
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 7, samples)

    def column():
        return [generator.normal(size=n).astype(np.float32) for n in lengths]

    masks = [generator.random(n) < 0.7 for n in lengths]
    return group(generator.normal(size=samples), None, masks, column(), column(), column())


def reordered(rewards, order):
    def picked(column):
        return [column[i] for i in order]

    return group(
        rewards.rewards[order],
        rewards.raw[order],
        picked(rewards.masks),
        picked(rewards.logprobs),
        picked(rewards.ref_logprobs),
        picked(rewards.values),
    )


def spoiled(rewards, junk):
    def filled(column):
        return [np.where(mask, values, np.float32(junk)) for values, mask in zip(column, rewards.masks, strict=True)]

    return group(
        rewards.rewards,
        rewards.raw,
        rewards.masks,
        filled(rewards.logprobs),
        filled(rewards.ref_logprobs),
        filled(rewards.values),
    )


def numbers(found):
    return [np.concatenate(column) for column in (found.advantages, found.returns or found.advantages)]


@pytest.mark.parametrize(
    ("raw", "shaped", "signal"), [([0, 0], [0, -1], False), ([1, 0], [0.5, 0.5], True), ([1, 0], [1, 0], True)]
)
def test_a_signal_is_in_the_raw_rewards_whatever_shaping_did(raw, shaped, signal):
    for algorithm in (AlgorithmConfig(), AlgorithmConfig(name="ppo")):
        zeros = [np.zeros(2, dtype=np.float32)] * 2
        assert make_estimate(algorithm)(group(shaped, raw, values=zeros)).has_signal is signal
    assert make_estimate(AlgorithmConfig())(group([3.0])).has_signal is False


def test_advantages_are_of_the_shaped_rewards():
    found = make_estimate(AlgorithmConfig(advantage_args={"scale_by_std": False}))(group([0, -1], [0, 0]))
    assert [list(a) for a in found.advantages] == [[0.5, 0.5], [-0.5, -0.5]]
    assert found.returns is None
    assert found.metrics == {}


def test_the_kl_of_the_whole_response_is_taken_off_its_reward():
    algorithm = AlgorithmConfig(name="reinforce_pp", kl=IN_REWARD)
    masks = [np.array([True, False, True]), np.array([True, True])]
    logprobs = [np.array([-1.0, 50, -2], dtype=np.float32), np.array([-1.0, -1], dtype=np.float32)]
    ref = [np.array([-1.5, 0, -2.25], dtype=np.float32), np.array([-1.0, -0.5], dtype=np.float32)]
    found = make_estimate(algorithm)(group([1.0, 0.0], None, masks, logprobs, ref))
    np.testing.assert_allclose(found.advantages[0], [1 - 0.5 * 0.75] * 3, atol=1e-6)
    np.testing.assert_allclose(found.advantages[1], [0.25, 0.25], atol=1e-6)
    assert found.metrics["kl"] == pytest.approx((0.25, 4))


def test_with_a_critic_the_kl_is_taken_off_each_token_and_the_score_comes_last():
    algorithm = AlgorithmConfig(name="ppo", kl=IN_REWARD, critic=CriticConfig(gamma=1.0, lam=1.0))
    masks = [np.array([True, False, True, True, False])]
    logprobs = [np.array([-1.0, 9, -1, -1, 9], dtype=np.float32)]
    ref = [np.array([-1.5, 0, -1.0, -0.5, 0], dtype=np.float32)]
    values = [np.array([0.25, 9, 0.5, 0.75, 9], dtype=np.float32)]
    found = make_estimate(algorithm)(group([2.0], None, masks, logprobs, ref, values))
    np.testing.assert_allclose(found.returns[0], [2.0, 0, 2.25, 2.25, 0], atol=1e-6)
    np.testing.assert_allclose(found.advantages[0], [1.75, 0, 1.75, 1.5, 0], atol=1e-6)
    assert found.metrics["kl"] == pytest.approx((0.0, 3))


def test_gae_gets_the_critics_gamma_and_lambda():
    critic = CriticConfig(gamma=0.9, lam=0.8)
    values = [np.array([0.5, 0.6, 0.7], dtype=np.float32)]
    masks = [np.ones(3, dtype=bool)]
    found = make_estimate(AlgorithmConfig(name="ppo", critic=critic))(group([1.0], masks=masks, values=values))
    np.testing.assert_allclose(found.advantages[0], [0.21712, 0.246, 0.3], atol=1e-5)
    np.testing.assert_allclose(found.returns[0], [0.71712, 0.846, 1.0], atol=1e-5)


@pytest.mark.parametrize("kl", [KlConfig(), KlConfig(coef=0.5), KlConfig(where="reward")])
def test_without_a_kl_in_the_reward_the_reference_is_never_looked_at(kl):
    estimate = make_estimate(AlgorithmConfig(kl=kl))
    plain = estimate(group([1.0, 0.0]))
    other = estimate(group([1.0, 0.0], ref=[np.full(2, np.nan, dtype=np.float32)] * 2))
    np.testing.assert_array_equal(numbers(plain), numbers(other))
    assert plain.metrics == other.metrics == {}


@every
@few
@given(seed=st.integers(0, 2**31), samples=st.integers(1, 6), data=st.data())
def test_sample_order_never_matters(algorithm, seed, samples, data):
    rewards = drawn(seed, samples)
    order = data.draw(st.permutations(range(samples)))
    estimate = make_estimate(algorithm)
    found, other = estimate(rewards), estimate(reordered(rewards, order))
    for place, row in enumerate(order):
        np.testing.assert_array_equal(other.advantages[place], found.advantages[row])
        if found.returns is not None:
            np.testing.assert_array_equal(other.returns[place], found.returns[row])
    assert other.metrics == found.metrics
    assert other.has_signal == found.has_signal
    assert all(row.dtype == np.float32 for row in found.advantages)


@every
@few
@given(seed=st.integers(0, 2**31), samples=st.integers(1, 5), junk=st.sampled_from([np.nan, np.inf, -np.inf, 1e30]))
def test_masked_positions_never_matter(algorithm, seed, samples, junk):
    rewards = drawn(seed, samples)
    estimate = make_estimate(algorithm)
    found, other = estimate(rewards), estimate(spoiled(rewards, junk))
    np.testing.assert_array_equal(numbers(found), numbers(other))
    assert found.metrics == other.metrics


@pytest.mark.parametrize(
    ("algorithm", "said"),
    [
        ({"advantage": "groo"}, "algorithm.advantage.*grpo"),
        ({"advantage": "gae"}, "critic.*name=ppo"),
        ({"name": "ppo", "advantage": "grpo"}, "one number per sample.*gae"),
        ({"advantage_args": {"scale": False}}, "algorithm.advantage_args.*'scale'.*scale_by_std"),
        ({"advantage_args": {"scale_by_std": "no"}}, "scale_by_std.*true or false"),
        ({"advantage": "reinforce", "advantage_args": {"scale_by_std": False}}, "takes: none"),
        ({"name": "ppo", "advantage_args": {"gamma": 0.9}}, "'gamma' is a setting of its own"),
        ({"kl": KlConfig(coef=1.0, estimator="k9", where="reward")}, "algorithm.kl.estimator"),
    ],
)
def test_what_does_not_fit_is_refused_at_start(algorithm, said):
    with pytest.raises(UserError, match=said):
        make_estimate(AlgorithmConfig(**algorithm))


def test_estimators_from_a_file_are_used_by_name(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy as np\n"
        "def best(rewards, group_ids, *, scale=1.0):\n"
        "    return scale * (rewards - rewards.max())\n"
        "def plain(rewards, values, mask):\n"
        "    return np.where(mask, rewards, 0.0).astype(np.float32), values\n"
    )
    found = make_estimate(AlgorithmConfig(advantage=f"{file}:best", advantage_args={"scale": 2.0}))(group([1.0, 0.0]))
    assert [list(a) for a in found.advantages] == [[0, 0], [-2, -2]]
    values = [np.zeros(2, dtype=np.float32)]
    found = make_estimate(AlgorithmConfig(name="ppo", advantage=f"{file}:plain"))(group([3.0], values=values))
    assert list(found.advantages[0]) == [0, 3]
    with pytest.raises(UserError, match=r"algorithm\.critic\.gamma is 0\.9, but .* takes no gamma"):
        make_estimate(AlgorithmConfig(name="ppo", advantage=f"{file}:plain", critic=CriticConfig(gamma=0.9)))


def test_whitened_advantages_have_mean_0_and_deviation_1_over_tokens():
    masks = [np.array([True, True, False]), np.array([True])]
    whitened = whiten([np.array([1.0, 2.0, 1e9], dtype=np.float32), np.array([6.0], dtype=np.float32)], masks)
    std = np.std([1, 2, 6], ddof=1)
    np.testing.assert_allclose(whitened[0], [-2 / std, -1 / std, 0], rtol=1e-6)
    np.testing.assert_allclose(whitened[1], [3 / std], rtol=1e-6)
    assert all(row.dtype == np.float32 for row in whitened)


@few
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 6), junk=st.sampled_from([np.nan, np.inf, 1e30]), data=st.data())
def test_whitening_does_not_depend_on_order_or_masked_positions(seed, rows, junk, data):
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 9, rows)
    masks = [generator.random(n) < 0.6 for n in lengths]
    advantages = [(generator.normal(size=n) * 10).astype(np.float32) for n in lengths]
    order = data.draw(st.permutations(range(rows)))
    plain = whiten(advantages, masks)
    junked = [np.where(mask, row, np.float32(junk)) for row, mask in zip(advantages, masks, strict=True)]
    other = whiten([junked[i] for i in order], [masks[i] for i in order])
    for place, row in enumerate(order):
        np.testing.assert_array_equal(other[place], plain[row])
        assert (plain[row][~masks[row]] == 0).all()


def test_whitening_sums_in_one_order_whatever_the_order_of_the_samples():
    rows = [np.array([value], dtype=np.float32) for value in (1e30, 1.0, -1e30)]
    mask = [np.ones(1, dtype=bool)] * 3
    plain = whiten(rows, mask)
    for order in itertools.permutations(range(3)):
        for row, seen in zip(order, whiten([rows[i] for i in order], mask), strict=True):
            assert seen == plain[row]


@few
@given(base=st.floats(-10, 10), values=st.lists(st.floats(0, 1) | st.floats(0, 1e-6), min_size=1, max_size=30))
def test_whitened_advantages_of_spread_one_never_explode(base, values):
    row = (base + np.array(values)).astype(np.float32)
    [whitened] = whiten([row], [np.ones(len(row), dtype=bool)])
    assert (np.abs(whitened) <= 100 * (1 + 1e-5)).all()


def test_whitening_hides_no_nan_and_lets_nothing_be_nothing():
    mask = np.ones(2, dtype=bool)
    assert np.isnan(whiten([np.array([1.0, np.nan]), np.array([0.0, 1.0])], [mask, mask])[1]).all()
    assert (whiten([np.array([np.nan, np.nan])], [~mask])[0] == 0).all()
    assert whiten([], []) == []
    for value in (0.0, 0.1, 0.35, 0.95):
        rows = [np.full(n, value, dtype=np.float32) for n in (3, 64, 1)]
        whitened = whiten(rows, [np.ones(len(row), dtype=bool) for row in rows])
        assert max(np.abs(row).max() for row in whitened) < 1e-12
