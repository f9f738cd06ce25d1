import math

import pytest
import torch

from tests.unit.algorithms.batches import Batch, run
from tranship.algorithms.corrections import (
    band_sequence,
    band_token,
    decoupled,
    truncated_sequence,
    truncated_token,
)
from tranship.algorithms.objective import make_loss
from tranship.config.schema import AlgorithmConfig, CorrectionConfig
from tranship.types import UserError

RATIOS = torch.tensor([[0.25, 1.0, 1.5, 4.0], [1.2, 1.2, 1.2, 9.0]])
MASK = torch.tensor([[True] * 4, [True, True, True, False]])


def corrected(correction, ratios=RATIOS, **args):
    """(weights, kept, metrics) at these ratios of the proximal policy to the behaviour."""
    return correction(torch.full_like(ratios, -2.0), ratios.log() - 2.0, MASK, **args)


def test_truncated_token_caps_each_ratio():
    weights, kept, metrics = corrected(truncated_token)
    torch.testing.assert_close(weights[MASK], torch.tensor([0.25, 1.0, 1.5, 2.0, 1.2, 1.2, 1.2]))
    assert kept.all()
    assert metrics["correction_capped_frac"] == (1, 7)
    assert metrics["correction_weight_mean"] == pytest.approx((8.35, 7), abs=1e-5)
    assert corrected(truncated_token, cap=3.0)[0][0, 3] == pytest.approx(3.0)


def test_truncated_sequence_caps_the_product_of_the_unmasked_ratios():
    weights, kept, metrics = corrected(truncated_sequence)
    torch.testing.assert_close(weights, torch.tensor([[1.5] * 4, [1.728] * 4]))
    assert kept.all()
    assert metrics["correction_capped_frac"] == (0, 7)
    weights, _, metrics = corrected(truncated_sequence, cap=1.6)
    torch.testing.assert_close(weights, torch.tensor([[1.5] * 4, [1.6] * 4]))
    assert metrics["correction_capped_frac"] == (3, 7)


def test_band_token_drops_the_tokens_outside():
    weights, kept, metrics = corrected(band_token)
    assert kept[MASK].tolist() == [False, True, True, False, True, True, True]
    torch.testing.assert_close(weights[MASK], torch.tensor([0.0, 1.0, 1.5, 0.0, 1.2, 1.2, 1.2]))
    assert metrics["correction_masked_frac"] == (2, 7)


def test_band_sequence_drops_whole_rows_by_their_geometric_mean():
    weights, kept, metrics = corrected(band_sequence, high=1.15)
    assert kept.tolist() == [[True] * 4, [False] * 4]
    assert weights.tolist() == [[1.0] * 4, [0.0] * 4]
    assert metrics["correction_masked_frac"] == (3, 7)
    assert corrected(band_sequence, high=1.25)[1].all()
    assert corrected(band_sequence, 1 / RATIOS, low=0.85)[1].tolist() == [[True] * 4, [False] * 4]


def test_decoupled_weighs_with_the_whole_ratio():
    weights, kept, metrics = corrected(decoupled)
    torch.testing.assert_close(weights[MASK], RATIOS[MASK])
    assert kept.all()
    assert metrics["correction_weight_mean"] == pytest.approx((float(RATIOS[MASK].sum()), 7), abs=1e-5)


@pytest.mark.parametrize("correction", [truncated_token, truncated_sequence])
@pytest.mark.parametrize("cap", [0.5, -1.0, float("nan")])
def test_a_cap_below_one_is_refused(correction, cap):
    with pytest.raises(UserError, match="cap"):
        corrected(correction, cap=cap)


@pytest.mark.parametrize("correction", [band_token, band_sequence])
@pytest.mark.parametrize(("low", "high"), [(1.5, 2.0), (0.5, 0.9), (2.0, 0.5), (-1.0, 2.0), (float("nan"), 2.0)])
def test_a_band_that_leaves_out_equal_policies_is_refused(correction, low, high):
    with pytest.raises(UserError, match="low"):
        corrected(correction, low=low, high=high)


def one_row(correction, current, proximal, behaviour):
    """(loss, gradient) of the clip loss at advantage 1, token-mean, of log-probs given as numbers."""
    batch = Batch(
        torch.tensor([current]),
        torch.tensor([behaviour]),
        torch.ones(1, len(current)),
        torch.ones(1, len(current), dtype=torch.bool),
        proximal_logprobs_BT=torch.tensor([proximal]),
        entropy_BT=torch.zeros(1, len(current)),
    )
    algorithm = AlgorithmConfig(correction=CorrectionConfig(name=correction))
    loss, gradients, metrics = run(make_loss(algorithm), batch)
    return loss.item(), gradients[0, 0].tolist(), metrics


def test_the_ratio_is_against_the_proximal_policy_and_the_weight_against_the_behaviour():
    loss, gradient, metrics = one_row("decoupled", [math.log(1.1)], [0.0], [-math.log(3.0)])
    assert loss == pytest.approx(-3.3, abs=1e-5)
    assert gradient == pytest.approx([-3.3], abs=1e-5)
    assert metrics["ratio_mean"] == pytest.approx((1.1, 1), abs=1e-5)
    loss, gradient, _ = one_row("decoupled", [math.log(1.5)], [0.0], [-math.log(3.0)])
    assert loss == pytest.approx(-3.6, abs=1e-5)
    assert gradient == [0.0]


def test_a_dropped_token_has_no_gradient_and_still_counts():
    loss, gradient, metrics = one_row("band_token", [0.0, 0.0], [0.0, 0.0], [0.0, 5.0])
    assert loss == pytest.approx(-0.5)
    assert gradient == [-0.5, 0.0]
    assert metrics["correction_masked_frac"] == (1, 2)
