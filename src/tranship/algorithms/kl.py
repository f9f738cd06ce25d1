"""Estimators of KL(policy || reference) per token from the log-probs of the sampled tokens (Schulman 2020,
"Approximating KL Divergence"). With d = ref - logp: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d.

Shapes: B samples, T response tokens. Results are 0, without gradient, outside the mask.
"""

from __future__ import annotations

import math

import torch

from tranship.algorithms.masked import where_mask

# Above this d, k3 goes on as a straight line: exp(d) would overflow, and the slope keeps its sign and stays finite.
K3_LINEAR_ABOVE = 10.0


def k1(logprobs_BT: torch.Tensor, ref_logprobs_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """-d: unbiased in value, but as a loss its gradient is 0 in expectation."""
    return where_mask(logprobs_BT - ref_logprobs_BT, mask_BT)


def k2(logprobs_BT: torch.Tensor, ref_logprobs_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """d^2 / 2: biased in value; its gradient is that of the KL, in expectation."""
    d_BT = where_mask(ref_logprobs_BT - logprobs_BT, mask_BT)
    return d_BT.square() / 2


def k3(logprobs_BT: torch.Tensor, ref_logprobs_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """exp(d) - 1 - d: unbiased, never negative; straight above d = 10 (value 22,015 there, slope -22,025 in logp)."""
    d_BT = where_mask(ref_logprobs_BT - logprobs_BT, mask_BT)
    bounded_BT = d_BT.clamp(max=K3_LINEAR_ABOVE)
    beyond_BT = (d_BT - K3_LINEAR_ABOVE).clamp(min=0) * math.expm1(K3_LINEAR_ABOVE)
    return torch.expm1(bounded_BT) - bounded_BT + beyond_BT
