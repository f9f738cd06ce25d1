import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tranship.algorithms import LOSSES
from tranship.algorithms.losses import clip
from tranship.lookup import resolve

OPTIONS = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
JUNK = [float("nan"), float("inf"), -float("inf"), 1e30]


def at_ratio(ratio, advantage, **options):
    logprobs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    losses, metrics = clip(
        logprobs, torch.zeros(1, 1), torch.full((1, 1), float(advantage)), mask, **{**OPTIONS, **options}
    )
    losses.sum().backward()
    assert logprobs.grad is not None
    return losses.item(), logprobs.grad.item(), metrics


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "loss", "gradient"),
    [
        (1.5, 1, {}, -1.2, 0),
        (1.5, -1, {}, 1.5, 1.5),
        (0.5, -1, {}, 0.8, 0),
        (0.5, 1, {}, -0.5, -0.5),
        (20, -1, {"dual_clip": 10.0}, 10, 0),
        (20, 1, {"dual_clip": 10.0}, -1.2, 0),
        (1.3, 1, {"clip_high": 0.28}, -1.28, 0),
        (1.25, 1, {"clip_high": 0.28}, -1.25, -1.25),
        (1.0, 1, {}, -1.0, -1.0),
        (1.0, -1, {"dual_clip": 10.0}, 1.0, 1.0),
    ],
)
def test_clip_bounds_the_side_that_would_gain(ratio, advantage, options, loss, gradient):
    seen_loss, seen_gradient, _ = at_ratio(ratio, advantage, **options)
    assert seen_loss == pytest.approx(loss, abs=1e-5)
    assert seen_gradient == pytest.approx(gradient, abs=1e-5)


def test_metrics_count_unmasked_tokens_only():
    ratios = torch.tensor([[1.5, 1.5, 0.5, 0.5, 99.0]])
    advantages = torch.tensor([[1.0, -1, -1, 1, 1]])
    mask = torch.tensor([[True] * 4 + [False]])
    _, metrics = clip(ratios.log(), torch.zeros(1, 5), advantages, mask, **OPTIONS)
    assert metrics["clip_frac"] == (2, 4)
    assert metrics["ratio_mean"] == pytest.approx((4.0, 4))
    expected_kl = sum(r - 1 - math.log(r) for r in (1.5, 1.5, 0.5, 0.5))
    assert metrics["approx_kl"] == pytest.approx((expected_kl, 4), abs=1e-5)


def test_dual_clip_is_counted_apart():
    _, _, metrics = at_ratio(20, -1, dual_clip=10.0)
    assert metrics["dual_clip_frac"] == (1, 1)
    assert metrics["clip_frac"] == (0, 1)


def test_a_huge_ratio_stays_finite():
    logprobs = torch.tensor([[-1.0]], requires_grad=True)
    losses, metrics = clip(
        logprobs, torch.tensor([[-1e4]]), -torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool), **OPTIONS
    )
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
    assert all(math.isfinite(total) for total, _ in metrics.values())


def batch(seed, rows, tokens):
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randn(rows, tokens, generator=generator) for _ in range(3)]
    return inputs, torch.rand(rows, tokens, generator=generator) < 0.6


def run(name, inputs, mask, dual_clip):
    logprobs = inputs[0].clone().requires_grad_()
    loss = resolve(name, LOSSES, "algorithm.loss")
    losses, metrics = loss(logprobs, *inputs[1:], mask, clip_low=0.2, clip_high=0.28, dual_clip=dual_clip)
    losses.sum().backward()
    return losses.detach(), logprobs.grad, metrics


@pytest.mark.parametrize("name", LOSSES)
@given(
    seed=st.integers(0, 2**31),
    rows=st.integers(1, 5),
    tokens=st.integers(1, 9),
    junk=st.lists(st.sampled_from(JUNK), min_size=3, max_size=3),
    dual_clip=st.sampled_from([None, 1.5]),
)
def test_masked_positions_never_matter(name, seed, rows, tokens, junk, dual_clip):
    inputs, mask = batch(seed, rows, tokens)
    losses, gradient, metrics = run(name, inputs, mask, dual_clip)
    spoiled = [x.masked_fill(~mask, value) for x, value in zip(inputs, junk, strict=True)]
    other_losses, other_gradient, other_metrics = run(name, spoiled, mask, dual_clip)
    assert torch.equal(losses, other_losses)
    assert torch.equal(gradient, other_gradient)
    assert metrics == other_metrics
    assert (losses[~mask] == 0).all()
    assert (gradient[~mask] == 0).all()


@pytest.mark.parametrize("name", LOSSES)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 6), tokens=st.integers(1, 9), data=st.data())
def test_row_order_never_matters(name, seed, rows, tokens, data):
    inputs, mask = batch(seed, rows, tokens)
    order = torch.tensor(data.draw(st.permutations(range(rows))))
    losses, gradient, metrics = run(name, inputs, mask, 2.0)
    other_losses, other_gradient, other_metrics = run(name, [x[order] for x in inputs], mask[order], 2.0)
    assert torch.equal(other_losses, losses[order])
    assert torch.equal(other_gradient, gradient[order])
    for key, (total, weight) in metrics.items():
        assert other_metrics[key] == pytest.approx((total, weight), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("which", range(3))
def test_a_nan_at_a_valid_position_is_not_hidden(name, which):
    inputs, mask = batch(3, 2, 4)
    mask[0, 1] = True
    inputs[which][0, 1] = float("nan")
    losses, _, _ = run(name, inputs, mask, 2.0)
    assert torch.isnan(losses[0, 1])
