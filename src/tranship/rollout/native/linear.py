"""Matrix products with the small operation behind them fused where the kernel can: packed for oneDNN, or plain."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional


class Linear(Protocol):
    """x [N, I] times a weight [O, I], plus a bias [O] if there is one."""

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        """The product [N, O]."""
        ...

    def add(self, x_NI: torch.Tensor, other_NO: torch.Tensor) -> torch.Tensor:
        """The product plus `other_NO`."""
        ...

    def silu(self, x_NI: torch.Tensor) -> torch.Tensor:
        """silu of the product."""
        ...

    def mul(self, x_NI: torch.Tensor, other_NO: torch.Tensor) -> torch.Tensor:
        """The product times `other_NO`."""
        ...


class PackedLinear:
    """A copy of the weight in the order that oneDNN's kernels read (CPU).

    A row's result does not depend, to the bit, on the rows beside it: the kernel for a single row is another one,
    so a single row is computed as two.
    """

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI.contiguous())
        self._bias = None if bias_O is None else bias_O.clone()

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        return self._unary(x_NI, "none")

    def add(self, x_NI: torch.Tensor, other_NO: torch.Tensor) -> torch.Tensor:
        return self._binary(x_NI, other_NO, "add")

    def silu(self, x_NI: torch.Tensor) -> torch.Tensor:
        return self._unary(x_NI, "swish")

    def mul(self, x_NI: torch.Tensor, other_NO: torch.Tensor) -> torch.Tensor:
        return self._binary(x_NI, other_NO, "mul")

    def _unary(self, x_NI: torch.Tensor, operation: str) -> torch.Tensor:
        if x_NI.shape[0] == 1:
            return self._unary(_twice(x_NI), operation)[:1]
        return torch.ops.mkldnn._linear_pointwise(x_NI, self._weight, self._bias, operation, [], "")

    def _binary(self, x_NI: torch.Tensor, other_NO: torch.Tensor, operation: str) -> torch.Tensor:
        if x_NI.shape[0] == 1:
            return self._binary(_twice(x_NI), _twice(other_NO), operation)[:1]
        return torch.ops.mkldnn._linear_pointwise.binary(x_NI, other_NO, self._weight, self._bias, operation)


class PlainLinear:
    """The weight as it is (devices other than a CPU, or a torch without oneDNN)."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        self._weight = weight_OI
        self._bias = bias_O

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        return functional.linear(x_NI, self._weight, self._bias)

    def add(self, x_NI: torch.Tensor, other_NO: torch.Tensor) -> torch.Tensor:
        return self(x_NI).add_(other_NO)

    def silu(self, x_NI: torch.Tensor) -> torch.Tensor:
        return functional.silu(self(x_NI), inplace=True)

    def mul(self, x_NI: torch.Tensor, other_NO: torch.Tensor) -> torch.Tensor:
        return self(x_NI).mul_(other_NO)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch and processor have oneDNN's packed product for `dtype`."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def make_linear(weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> Linear:
    """The fastest product for where the weight lies."""
    kind = PackedLinear if can_pack(weight_OI.dtype, weight_OI.device) else PlainLinear
    return kind(weight_OI, bias_O)


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x.expand(2, -1).contiguous()
