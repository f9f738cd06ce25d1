import math

import pytest
import torch

from tests.unit.algorithms.batches import Batch, draw, run, select, totals_of
from tranship.algorithms.objective import make_loss
from tranship.algorithms.pairs import PairObjective, dpo, ipo
from tranship.config.schema import AlgorithmConfig
from tranship.types import UserError


def at(loss, chosen, rejected, **args):
    """(loss, d loss / d chosen, d loss / d rejected, metrics) of one pair."""
    both = torch.tensor([chosen, rejected], dtype=torch.float64, requires_grad=True)
    losses, metrics = loss(both[:1], both[1:], **args)
    losses.sum().backward()
    assert both.grad is not None
    return losses.item(), *both.grad.tolist(), metrics


def test_dpo_without_a_margin_is_log_2():
    loss, of_chosen, of_rejected, _ = at(dpo, 3.0, 3.0, beta=0.5)
    assert loss == pytest.approx(math.log(2))
    assert of_chosen == pytest.approx(-0.25)
    assert of_rejected == pytest.approx(0.25)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_dpo_is_the_log_likelihood_of_the_preference(smoothing):
    loss, of_chosen, _, metrics = at(dpo, 2.0, -4.0, beta=0.25, label_smoothing=smoothing)
    p = 1 / (1 + math.exp(-1.5))
    assert loss == pytest.approx(-(1 - smoothing) * math.log(p) - smoothing * math.log(1 - p))
    assert of_chosen == pytest.approx(0.25 * (-(1 - smoothing) * (1 - p) + smoothing * p))
    assert metrics == {
        "pair_margin": (1.5, 1),
        "pair_accuracy": (1, 1),
        "pair_chosen_reward": (0.5, 1),
        "pair_rejected_reward": (-1.0, 1),
    }


def test_ipo_pulls_the_margin_to_its_target():
    assert at(ipo, 1.0, 1.0, beta=0.1)[0] == pytest.approx(25.0)
    loss, of_chosen, of_rejected, _ = at(ipo, 4.0, 1.0, beta=0.25)
    assert loss == pytest.approx(1.0)
    assert (of_chosen, of_rejected) == pytest.approx((2.0, -2.0))
    assert at(ipo, 3.0, 1.0, beta=0.25)[0] == 0


@pytest.mark.parametrize(
    ("loss", "args", "named"),
    [
        (dpo, {"beta": 0.0}, "beta"),
        (ipo, {"beta": -1.0}, "beta"),
        (dpo, {"label_smoothing": 0.5}, "label_smoothing"),
        (dpo, {"label_smoothing": -0.1}, "label_smoothing"),
    ],
)
def test_arguments_out_of_range_are_refused(loss, args, named):
    with pytest.raises(UserError, match=named):
        at(loss, 0.0, 0.0, **args)


def two_pairs():
    """Groups 8 and 3, their rows not side by side; log-ratios of the responses 1, -2, 5, 0.5."""
    logprobs = torch.tensor([[0.5, 0.5, 9.0], [-1.0, -1.0, 0.0], [5.0, 9.0, 9.0], [0.0, 0.25, 0.25]])
    mask = torch.tensor([[True, True, False], [True, True, True], [True, False, False], [True, True, True]])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])[:, None].expand(4, 3)
    zeros = torch.zeros(4, 3)
    return Batch(logprobs, zeros, advantages, mask, zeros, group_B=torch.tensor([8, 3, 3, 8]), entropy_BT=zeros)


def test_pairs_are_found_by_group_and_averaged():
    loss, gradients, metrics = run(make_loss(AlgorithmConfig(name="dpo", loss_args={"beta": 1.0})), two_pairs())
    expected = (math.log1p(math.exp(-0.5)) + math.log1p(math.exp(7.0))) / 2
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert metrics["pair_accuracy"] == (1, 2)
    assert metrics["pair_margin"] == pytest.approx((0.5 - 7.0, 2))
    assert metrics["pair_incomplete_frac"] == (0, 2)
    pull = 0.5 / (1 + math.exp(-7.0))
    assert gradients[0, 1].tolist() == pytest.approx([-pull] * 3)
    assert gradients[0, 2].tolist() == pytest.approx([pull, 0, 0])


def test_a_response_that_lost_its_partner_is_counted_and_trains_nothing():
    batch = two_pairs()
    batch.mask_BT[2] = False
    loss, gradients, metrics = run(make_loss(AlgorithmConfig(name="dpo")), batch)
    assert metrics["pair_incomplete_frac"] == (1, 2)
    assert (gradients[:, 1:3] == 0).all()
    alone = select(batch, torch.tensor([0, 3]))
    assert run(make_loss(AlgorithmConfig(name="dpo")), alone, totals_of(batch))[0] == loss


def test_a_batch_that_is_not_of_pairs_is_a_bug_that_shows():
    objective = PairObjective(dpo)
    with pytest.raises(AssertionError, match="advantages of a pair"):
        run(objective, draw(1, 4, 8))
    three = draw(1, 4, 8, of_pairs=True)
    three.group_B = torch.zeros(4, dtype=torch.int64)
    three.mask_BT[:] = True
    with pytest.raises(AssertionError, match="same side"):
        run(objective, three)
