"""The critic's loss. Shapes: B samples, T response tokens."""

from __future__ import annotations

import torch

from tranship.algorithms.masked import Metrics, metric, where_mask


def squared_error(
    values_BT: torch.Tensor,
    old_values_BT: torch.Tensor,
    returns_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    *,
    value_clip: float | None,
) -> tuple[torch.Tensor, Metrics]:
    """(token_losses_BT, metrics) of max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) / 2; None: no clip.

    arXiv:1707.06347, eq. 9 (its L^VF), with the clip of arXiv:2005.12729, section 3, and a factor of 1/2. V_old 1, V 2,
    R 0, c .2 gives 2. Metrics: value_loss, value_clip_frac (tokens whose gradient the clip removed), and what the share
    of the returns' variance that the values explain is made of: it is 1 - (value_error_square - (return_mean -
    value_mean)^2) / (return_square - return_mean^2).
    """
    values_BT, returns_BT = where_mask(values_BT, mask_BT), where_mask(returns_BT, mask_BT)
    error_BT = (values_BT - returns_BT).square()
    loss_BT, clipped_BT = error_BT, torch.zeros_like(error_BT)
    if value_clip is not None:
        old_BT = where_mask(old_values_BT, mask_BT)
        moved_BT = values_BT - old_BT
        held_BT = moved_BT.clamp(-value_clip, value_clip)
        # The value itself where it is not held: old + (value - old) may round to another number.
        near_BT = torch.where(held_BT == moved_BT, values_BT, old_BT + held_BT)
        bounded_BT = (near_BT - returns_BT).square()
        loss_BT, clipped_BT = torch.maximum(error_BT, bounded_BT), (bounded_BT > error_BT).float()
    loss_BT = where_mask(loss_BT / 2, mask_BT)
    return loss_BT, {
        "value_loss": metric(loss_BT, mask_BT),
        "value_clip_frac": metric(clipped_BT, mask_BT),
        "value_mean": metric(values_BT, mask_BT),
        "return_mean": metric(returns_BT, mask_BT),
        "return_square": metric(returns_BT.square(), mask_BT),
        "value_error_square": metric(error_BT, mask_BT),
    }
