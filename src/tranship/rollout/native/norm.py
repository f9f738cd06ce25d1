"""Root-mean-square norms, and the product behind a norm as one matrix."""

from __future__ import annotations

import torch

from tranship.rollout.native.kernels import Kernels
from tranship.rollout.native.linear import can_pack


class RmsNorm:
    """x over its root mean square (last dimension, in fp32), times a weight if that is not in a matrix already."""

    def __init__(self, weight: torch.Tensor | None, eps: float, device: torch.device, kernels: Kernels | None) -> None:
        self.weight = weight
        self._kernels = kernels
        self._eps_value = eps
        self._eps = torch.full((1, 1), eps, device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The same shape and dtype; x is [N, D] or [N, X, D]."""
        if self._kernels is not None:
            return self._kernels.norm(x, self.weight, self._eps_value)
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, size, size, value=1 / x.shape[-1]).rsqrt_()
        out = torch.mul(x, scale, out=torch.empty(x.shape, dtype=x.dtype, device=x.device))
        return out if self.weight is None else out.mul_(self.weight)


def fold_norm(norm: torch.Tensor, weight_OI: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """A norm's weight and the matrix behind it: one matrix where that is exact enough (fp32) and copied anyway."""
    if weight_OI.dtype != torch.float32 or not can_pack(weight_OI.dtype, weight_OI.device):
        return norm, weight_OI
    return None, weight_OI * norm
