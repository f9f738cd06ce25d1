"""Corrections for samples whose policy (the behaviour: another version, or another engine) is not the trained one.

The ratio of the loss is then current / proximal, the proximal policy being the trained one before this update, and the
token loss is multiplied by a weight w made from proximal / behaviour, a constant to the gradient. Where log-probs are
identical w is exactly 1. Log-ratios are held within MAX_LOG_RATIO before exp, so nothing overflows. Shapes: B samples,
T response tokens. Each function returns (weights_BT, kept_BT, metrics); a token that is not kept has loss 0 and no
gradient, and still counts in the step's normaliser, so that dropping some tokens does not enlarge the others' steps.
Terms of the KL and of the entropy are not weighted.
"""

from __future__ import annotations

import torch

from tranship.algorithms.masked import MAX_LOG_RATIO, Metrics, masked_mean, masked_sum, metric, where_mask
from tranship.types import UserError

Corrected = tuple[torch.Tensor, torch.Tensor, Metrics]


def truncated_token(
    behaviour_BT: torch.Tensor, proximal_BT: torch.Tensor, mask_BT: torch.Tensor, *, cap: float = 2.0
) -> Corrected:
    """w = min(proximal / behaviour, cap) of each token: truncated importance sampling (Ionides 2008).

    As used between training and inference engines by Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training". cap: at least 1. Metrics: correction_weight_mean, correction_capped_frac.
    """
    return _capped(_log_ratio(behaviour_BT, proximal_BT, mask_BT).exp(), cap, mask_BT)


def truncated_sequence(
    behaviour_BT: torch.Tensor, proximal_BT: torch.Tensor, mask_BT: torch.Tensor, *, cap: float = 2.0
) -> Corrected:
    """w = min(product over the row's unmasked tokens of proximal / behaviour, cap), the same for all its tokens.

    The importance weight of the whole response, truncated (Ionides 2008). cap and metrics: as truncated_token.
    """
    ratio_B1 = _bounded(masked_sum(proximal_BT - behaviour_BT, mask_BT, dim=-1)).exp().unsqueeze(-1)
    return _capped(ratio_B1.expand(mask_BT.shape), cap, mask_BT)


def band_token(
    behaviour_BT: torch.Tensor,
    proximal_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    low: float = 0.5,
    high: float = 2.0,
) -> Corrected:
    """w = proximal / behaviour of tokens where that is within [low, high]; the others are dropped.

    IcePop (arXiv:2510.18855, its M(k)). Metrics: correction_weight_mean (dropped tokens count as 0),
    correction_masked_frac.
    """
    ratio_BT = _log_ratio(behaviour_BT, proximal_BT, mask_BT).exp()
    return _banded(ratio_BT, ratio_BT, low, high, mask_BT)


def band_sequence(
    behaviour_BT: torch.Tensor,
    proximal_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    low: float = 0.5,
    high: float = 2.0,
) -> Corrected:
    """w = 1 for rows whose geometric mean of proximal / behaviour is within [low, high]; the others are dropped whole.

    The statistic is GSPO's ratio (arXiv:2507.18071, eq. 7), here as a test only. Metrics: as band_token; a dropped row
    counts with all its unmasked tokens.
    """
    ratio_B1 = _bounded(masked_mean(proximal_BT - behaviour_BT, mask_BT, dim=-1)).exp().unsqueeze(-1)
    ratio_BT = ratio_B1.expand(mask_BT.shape)
    # 1 for every number, and NaN for NaN.
    return _banded(ratio_BT, ratio_BT.clamp(1, 1), low, high, mask_BT)


def decoupled(behaviour_BT: torch.Tensor, proximal_BT: torch.Tensor, mask_BT: torch.Tensor) -> Corrected:
    """w = proximal / behaviour of each token, without a cap.

    The decoupled objective (AReaL, arXiv:2505.24298, section 5.2; Hilton et al., arXiv:2110.00641). Metric:
    correction_weight_mean.
    """
    weight_BT = _log_ratio(behaviour_BT, proximal_BT, mask_BT).exp()
    return weight_BT, torch.ones_like(mask_BT), {"correction_weight_mean": metric(weight_BT, mask_BT)}


def _log_ratio(behaviour_BT: torch.Tensor, proximal_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    return _bounded(where_mask(proximal_BT - behaviour_BT, mask_BT))


def _bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    return log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _capped(ratio_BT: torch.Tensor, cap: float, mask_BT: torch.Tensor) -> Corrected:
    if not cap >= 1:
        raise UserError(f"algorithm.correction.args: cap is {cap}: choose 1 or more, as samples of this policy weigh 1")
    weight_BT = ratio_BT.clamp(max=cap)
    metrics = {
        "correction_weight_mean": metric(weight_BT, mask_BT),
        "correction_capped_frac": metric((ratio_BT > cap).float(), mask_BT),
    }
    return weight_BT, torch.ones_like(mask_BT), metrics


def _banded(
    ratio_BT: torch.Tensor, weight_BT: torch.Tensor, low: float, high: float, mask_BT: torch.Tensor
) -> Corrected:
    if not 0 <= low <= 1 <= high:
        raise UserError(
            f"algorithm.correction.args: low {low}, high {high}: choose 0 <= low <= 1 <= high, as samples of this "
            "policy have ratio 1"
        )
    # A NaN is not outside: it stays, and shows.
    outside_BT = (ratio_BT < low) | (ratio_BT > high)
    weight_BT = where_mask(weight_BT, ~outside_BT)
    metrics = {
        "correction_weight_mean": metric(weight_BT, mask_BT),
        "correction_masked_frac": metric(outside_BT.float(), mask_BT),
    }
    return weight_BT, ~outside_BT, metrics
