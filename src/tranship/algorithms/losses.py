"""Policy losses per token. Shapes: B samples, T response tokens. Token losses are 0 outside the mask.

Metrics are (sum, weight) pairs over the unmasked tokens; those of all microbatches and ranks add up.
"""

from __future__ import annotations

import torch

from tranship.algorithms.kl import k3
from tranship.algorithms.masked import metric, where_mask

# Log-ratios are held within this before exp, so that no ratio overflows; a token beyond it has no gradient.
MAX_LOG_RATIO = 20.0


def clip(
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[torch.Tensor, dict[str, tuple[float, float]]]:
    """(token_losses_BT, metrics) of max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(logprobs - old).

    PPO's clipped objective (arXiv:1707.06347, eq. 7), with separate bounds (DAPO, arXiv:2503.14476). dual_clip c
    bounds the loss by -A c where A < 0 (arXiv:1912.09729). Metrics: clip_frac, ratio_mean, approx_kl (k3 of the
    sampler's policy against the current one), and dual_clip_frac when that is on.
    """
    log_ratio_BT = where_mask(logprobs_BT - old_logprobs_BT, mask_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_BT = log_ratio_BT.exp()
    negative_BT = -where_mask(advantages_BT, mask_BT)
    plain_BT = negative_BT * ratio_BT
    bounded_BT = negative_BT * ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    loss_BT = torch.maximum(plain_BT, bounded_BT)
    metrics = {
        "clip_frac": metric((bounded_BT > plain_BT).float(), mask_BT),
        "ratio_mean": metric(ratio_BT, mask_BT),
        "approx_kl": metric(k3(old_logprobs_BT, logprobs_BT.detach(), mask_BT), mask_BT),
    }
    if dual_clip is not None:
        ceiling_BT = negative_BT * dual_clip
        capped_BT = (negative_BT > 0) & (loss_BT > ceiling_BT)
        loss_BT = torch.where(capped_BT, ceiling_BT, loss_BT)
        metrics["dual_clip_frac"] = metric(capped_BT.float(), mask_BT)
    return where_mask(loss_BT, mask_BT), metrics
