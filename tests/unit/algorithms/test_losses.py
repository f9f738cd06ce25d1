import math

import pytest
import torch

from tranship.algorithms.losses import cispo, clip, gspo, reinforce, sft
from tranship.types import UserError

OPTIONS = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}


def at_ratio(loss, ratio, advantage, **options):
    """(loss, d loss / d logprob, metrics) of one token whose log-prob is log(ratio), and was 0."""
    logprobs = torch.tensor([[math.log(ratio)]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    losses, metrics = loss(logprobs, torch.zeros(1, 1), torch.full((1, 1), float(advantage)), mask, **options)
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
    seen_loss, seen_gradient, _ = at_ratio(clip, ratio, advantage, **{**OPTIONS, **options})
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
    _, _, metrics = at_ratio(clip, 20, -1, clip_low=0.2, clip_high=0.2, dual_clip=10.0)
    assert metrics["dual_clip_frac"] == (1, 1)
    assert metrics["clip_frac"] == (0, 1)


def rows(log_ratios, advantages, mask):
    """(logprobs that want a gradient, old log-probs, advantages, mask), float64."""
    old = torch.full_like(torch.tensor(log_ratios, dtype=torch.float64), -1.0)
    logprobs = (old + torch.tensor(log_ratios, dtype=torch.float64)).requires_grad_()
    return logprobs, old, torch.tensor(advantages, dtype=torch.float64).unsqueeze(-1).expand(old.shape), mask


def test_gspo_has_the_value_and_gradient_of_the_papers_sequence_objective():
    mask = torch.tensor([[True, True, True], [True, False, True], [True, True, False]])
    log_ratios = [[0.1, -0.05, 0.1], [-0.3, 9.0, 0.2], [0.9, 0.7, 0.0]]
    logprobs, old, advantages, _ = rows(log_ratios, [1.0, -2.0, 0.5], mask)
    losses, metrics = gspo(logprobs, old, advantages, mask, clip_low=0.2, clip_high=0.28)
    lengths = mask.sum(-1)
    (losses.sum(-1) / lengths).mean().backward()

    paper = logprobs.detach().clone().requires_grad_()
    s = (torch.where(mask, paper - old, 0.0).sum(-1) / lengths).exp()
    of_rows = -torch.minimum(s * advantages[:, 0], s.clamp(0.8, 1.28) * advantages[:, 0])
    of_rows.mean().backward()
    torch.testing.assert_close((losses.sum(-1) / lengths).mean(), of_rows.mean())
    torch.testing.assert_close(logprobs.grad, paper.grad)
    assert (logprobs.grad[2] == 0).all(), "the third row's ratio, exp(.8), is beyond the bound"
    assert metrics["clip_frac"] == (2, 7)
    assert metrics["ratio_mean"][0] == pytest.approx((s * lengths).sum().item())


def test_gspo_clips_whole_responses():
    mask = torch.ones(1, 2, dtype=torch.bool)
    logprobs, old, advantages, _ = rows([[2.0, -2.0]], [1.0], mask)
    losses, _ = gspo(logprobs, old, advantages, mask, clip_low=3e-4, clip_high=4e-4)
    losses.sum().backward()
    assert losses.tolist() == [[-1.0, -1.0]]
    torch.testing.assert_close(logprobs.grad, torch.full_like(old, -1.0))


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "weight"),
    [(1.5, 1, {}, 1.28), (1.5, -1, {}, 1.28), (0.5, 1, {}, 0.5), (0.5, -1, {"min_ratio": 0.8}, 0.8), (1.1, 2, {}, 1.1)],
)
def test_cispo_clips_the_weight_and_never_the_gradient(ratio, advantage, options, weight):
    loss, gradient, metrics = at_ratio(cispo, ratio, advantage, clip_high=0.28, **options)
    assert loss == pytest.approx(-weight * advantage * math.log(ratio), abs=1e-6)
    assert gradient == pytest.approx(-weight * advantage, abs=1e-6)
    assert metrics["clip_frac"] == (weight != ratio, 1)


@pytest.mark.parametrize("bound", [-0.1, 1.5, float("nan")])
def test_cispo_refuses_a_lower_bound_that_is_none(bound):
    with pytest.raises(UserError, match="min_ratio"):
        at_ratio(cispo, 1.0, 1, clip_high=0.2, min_ratio=bound)


@pytest.mark.parametrize("advantage", [2.0, -0.5])
def test_reinforce_pulls_by_the_advantage_whatever_the_ratio(advantage):
    for ratio in (0.1, 1.0, 7.0):
        loss, gradient, metrics = at_ratio(reinforce, ratio, advantage)
        assert loss == pytest.approx(-advantage * math.log(ratio), abs=1e-6)
        assert gradient == pytest.approx(-advantage)
        assert metrics["ratio_mean"][0] == pytest.approx(ratio, rel=1e-5)


def test_sft_is_the_negative_log_likelihood_of_the_unmasked_tokens():
    logprobs = torch.tensor([[-1.0, -2.0, -5.0]], requires_grad=True)
    mask = torch.tensor([[True, True, False]])
    nothing = torch.full((1, 3), float("nan"))
    losses, metrics = sft(logprobs, nothing, nothing, mask)
    losses.sum().backward()
    assert losses.tolist() == [[1.0, 2.0, 0.0]]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-1.0, -1.0, 0.0]]
    assert metrics == {"nll": (3.0, 2.0)}
