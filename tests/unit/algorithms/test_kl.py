import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tranship.algorithms import KL_ESTIMATORS
from tranship.lookup import resolve

JUNK = [float("nan"), float("inf"), -float("inf"), 1e30]


def run(name, logprobs, ref, mask):
    logprobs = logprobs.clone().requires_grad_()
    estimate = resolve(name, KL_ESTIMATORS, "algorithm.kl.estimator")
    values = estimate(logprobs, ref, mask)
    values.sum().backward()
    return values.detach(), logprobs.grad


def at(name, d):
    d = torch.tensor([d])
    values, gradient = run(name, torch.zeros_like(d), d, torch.ones_like(d, dtype=torch.bool))
    return values[0], gradient[0]


def test_k3_values_and_gradients():
    d = [0.0, 0.5, -0.5, 1.0]
    values, gradient = at("k3", d)
    torch.testing.assert_close(values, torch.tensor([0, 0.148721, 0.106531, 0.718282]), atol=1e-5, rtol=0)
    torch.testing.assert_close(gradient, torch.tensor([0, -0.648721, 0.393469, -1.718282]), atol=1e-5, rtol=0)


def test_k1_and_k2_values_and_gradients():
    d = [0.0, 0.5, -0.5, 1.0]
    values, gradient = at("k1", d)
    torch.testing.assert_close(values, -torch.tensor(d))
    assert (gradient == 1).all()
    values, gradient = at("k2", d)
    torch.testing.assert_close(values, torch.tensor([0, 0.125, 0.125, 0.5]))
    torch.testing.assert_close(gradient, -torch.tensor(d))


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@pytest.mark.parametrize("d", [100.0, -100.0, 1e4])
def test_far_from_the_reference_values_and_gradients_stay_finite(name, d):
    values, gradient = at(name, [d])
    assert torch.isfinite(values).all()
    assert torch.isfinite(gradient).all()


def test_k3_far_below_the_reference_still_pulls_up():
    values, gradient = at("k3", [9.0, 11.0, 100.0])
    assert (gradient < 0).all()
    assert (values.diff() > 0).all()


@pytest.mark.parametrize("name", KL_ESTIMATORS)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 5),
    tokens=st.integers(1, 9),
    junk=st.lists(st.sampled_from(JUNK), min_size=2, max_size=2),
    data=st.data(),
)
def test_masked_positions_and_row_order_never_matter(name, seed, rows, tokens, junk, data):
    generator = torch.Generator().manual_seed(seed)
    logprobs, ref = (torch.randn(rows, tokens, generator=generator) * 4 for _ in range(2))
    mask = torch.rand(rows, tokens, generator=generator) < 0.6
    values, gradient = run(name, logprobs, ref, mask)
    spoiled = logprobs.masked_fill(~mask, junk[0]), ref.masked_fill(~mask, junk[1])
    other_values, other_gradient = run(name, *spoiled, mask)
    assert torch.equal(values, other_values)
    assert torch.equal(gradient, other_gradient)
    order = torch.tensor(data.draw(st.permutations(range(rows))))
    other_values, other_gradient = run(name, logprobs[order], ref[order], mask[order])
    assert torch.equal(values[order], other_values)
    assert torch.equal(gradient[order], other_gradient)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_a_nan_at_a_valid_position_is_not_hidden(name):
    logprobs, mask = torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool)
    logprobs[1, 0] = float("nan")
    values, _ = run(name, logprobs, torch.zeros(2, 2), mask)
    assert torch.isnan(values).tolist() == [[False, False], [True, False]]
