"""Sums and means over a mask. Entries outside it are replaced, never multiplied, so NaN and inf there do not matter."""

from __future__ import annotations

import torch

# name -> (sum, weight): those of all microbatches and ranks are added up, then divided.
Metrics = dict[str, tuple[float, float]]

# Log-ratios are held within this before exp, so that no ratio overflows; a token beyond it has no gradient.
MAX_LOG_RATIO = 20.0


def where_mask(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """values where mask (bool, same shape) is True, exactly 0 elsewhere; no gradient reaches masked entries."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """The sum of the unmasked entries, over `dim` or over all; 0 where there are none."""
    kept = where_mask(values, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(values: torch.Tensor, mask: torch.Tensor, dim: int | None = None) -> torch.Tensor:
    """The mean of the unmasked entries, over `dim` or over all; 0 where there are none."""
    count = mask.sum() if dim is None else mask.sum(dim)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


def metric(values: torch.Tensor, mask: torch.Tensor) -> tuple[float, float]:
    """(sum, weight) of a metric over the unmasked entries; float64, so that adding up parts loses nothing visible."""
    kept = where_mask(values.detach(), mask).to("cpu", torch.float64)
    return float(kept.sum()), float(mask.sum())
