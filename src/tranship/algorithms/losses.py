"""Policy losses per token. Shapes: B samples, T response tokens. Token losses are 0 outside the mask.

`old` is the policy that the ratio is taken against: the sampler's, or with a correction the proximal one. Metrics are
(sum, weight) pairs over the unmasked tokens; those of all microbatches and ranks add up.
"""

from __future__ import annotations

import torch

from tranship.algorithms.kl import k3
from tranship.algorithms.masked import MAX_LOG_RATIO, Metrics, masked_mean, metric, where_mask
from tranship.types import UserError


def clip(
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> tuple[torch.Tensor, Metrics]:
    """(token_losses_BT, metrics) of max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(logprobs - old).

    PPO's clipped objective (arXiv:1707.06347, eq. 7), with separate bounds (DAPO, arXiv:2503.14476). dual_clip c
    bounds the loss by -A c where A < 0 (arXiv:1912.09729). Metrics: clip_frac, ratio_mean, approx_kl (k3 of the
    old policy against the current one), and dual_clip_frac when that is on.
    """
    ratio_BT = _log_ratio(logprobs_BT, old_logprobs_BT, mask_BT).exp()
    loss_BT, clipped_BT, negative_BT = _clipped(ratio_BT, advantages_BT, mask_BT, clip_low, clip_high)
    metrics = {"clip_frac": metric(clipped_BT, mask_BT), **_drift(ratio_BT, logprobs_BT, old_logprobs_BT, mask_BT)}
    if dual_clip is not None:
        ceiling_BT = negative_BT * dual_clip
        capped_BT = (negative_BT > 0) & (loss_BT > ceiling_BT)
        loss_BT = torch.where(capped_BT, ceiling_BT, loss_BT)
        metrics["dual_clip_frac"] = metric(capped_BT.float(), mask_BT)
    return where_mask(loss_BT, mask_BT), metrics


def gspo(
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, Metrics]:
    """(token_losses_BT, metrics) of max(-A s, -A clip(s, 1 - clip_low, 1 + clip_high)), s of the whole response.

    Group sequence policy optimization (arXiv:2507.18071, eq. 5): s = exp(mean over the unmasked tokens of
    logprobs - old), the same for every token of a row, and so is the clip where the row has one advantage. The form is
    GSPO-token (section 4.3): each token's ratio is stop_gradient(s) * p / stop_gradient(p), so its gradient is its own.
    With one advantage per row, the row's sum of gradients is exactly that of eq. 5. The paper's aggregation is
    seq-mean-token-mean. Metrics: as `clip`; ratio_mean is of s.
    """
    mean_B1 = masked_mean((logprobs_BT - old_logprobs_BT).detach(), mask_BT, dim=-1).unsqueeze(-1)
    own_BT = where_mask(logprobs_BT, mask_BT)
    ratio_BT = (mean_B1 + (own_BT - own_BT.detach())).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    loss_BT, clipped_BT, _ = _clipped(ratio_BT, advantages_BT, mask_BT, clip_low, clip_high)
    metrics = {"clip_frac": metric(clipped_BT, mask_BT), **_drift(ratio_BT, logprobs_BT, old_logprobs_BT, mask_BT)}
    return where_mask(loss_BT, mask_BT), metrics


def cispo(
    logprobs_BT: torch.Tensor,
    old_logprobs_BT: torch.Tensor,
    advantages_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    clip_high: float,
    min_ratio: float = 0.0,
) -> tuple[torch.Tensor, Metrics]:
    """(token_losses_BT, metrics) of -stop_gradient(clip(r, min_ratio, 1 + clip_high)) * A * logprobs.

    CISPO (arXiv:2506.13585, eq. 4 and 5): the weight is clipped, never the gradient, so every token is trained. The
    paper sets no lower bound; min_ratio (0 to 1) is one for those who want it. Metrics: clip_frac (weights at a bound),
    ratio_mean, approx_kl.
    """
    if not 0 <= min_ratio <= 1:
        raise UserError(f"algorithm.loss_args: min_ratio of cispo is {min_ratio}: choose 0 (no bound) to 1")
    ratio_BT = _log_ratio(logprobs_BT, old_logprobs_BT, mask_BT).exp().detach()
    weight_BT = ratio_BT.clamp(min_ratio, 1 + clip_high)
    loss_BT = -where_mask(advantages_BT, mask_BT) * weight_BT * where_mask(logprobs_BT, mask_BT)
    metrics = {
        "clip_frac": metric((weight_BT != ratio_BT).float(), mask_BT),
        **_drift(ratio_BT, logprobs_BT, old_logprobs_BT, mask_BT),
    }
    return where_mask(loss_BT, mask_BT), metrics


def reinforce(
    logprobs_BT: torch.Tensor, old_logprobs_BT: torch.Tensor, advantages_BT: torch.Tensor, mask_BT: torch.Tensor
) -> tuple[torch.Tensor, Metrics]:
    """(token_losses_BT, metrics) of -A * logprobs (Williams 1992, eq. 4). No ratio: right for samples of this policy.

    Metrics: ratio_mean and approx_kl, which tell how far the samples are from that.
    """
    loss_BT = -where_mask(advantages_BT, mask_BT) * where_mask(logprobs_BT, mask_BT)
    ratio_BT = _log_ratio(logprobs_BT, old_logprobs_BT, mask_BT).exp()
    return where_mask(loss_BT, mask_BT), _drift(ratio_BT, logprobs_BT, old_logprobs_BT, mask_BT)


def sft(
    logprobs_BT: torch.Tensor, old_logprobs_BT: torch.Tensor, advantages_BT: torch.Tensor, mask_BT: torch.Tensor
) -> tuple[torch.Tensor, Metrics]:
    """(token_losses_BT, metrics) of -logprobs: maximum likelihood of recorded tokens. Metric: nll.

    Recorded tokens have neither an old policy nor an advantage: those inputs are not looked at.
    """
    loss_BT = -where_mask(logprobs_BT, mask_BT)
    return loss_BT, {"nll": metric(loss_BT, mask_BT)}


def _log_ratio(logprobs_BT: torch.Tensor, old_logprobs_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    return where_mask(logprobs_BT - old_logprobs_BT, mask_BT).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def _clipped(
    ratio_BT: torch.Tensor, advantages_BT: torch.Tensor, mask_BT: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(losses, 1.0 where the bound took the gradient away, -A)."""
    negative_BT = -where_mask(advantages_BT, mask_BT)
    plain_BT = negative_BT * ratio_BT
    bounded_BT = negative_BT * ratio_BT.clamp(1 - low, 1 + high)
    return torch.maximum(plain_BT, bounded_BT), (bounded_BT > plain_BT).float(), negative_BT


def _drift(
    ratio_BT: torch.Tensor, logprobs_BT: torch.Tensor, old_logprobs_BT: torch.Tensor, mask_BT: torch.Tensor
) -> Metrics:
    return {
        "ratio_mean": metric(ratio_BT, mask_BT),
        "approx_kl": metric(k3(old_logprobs_BT, logprobs_BT.detach(), mask_BT), mask_BT),
    }
