"""Matrix products with the small operation behind them fused where the kernel can: packed for our kernels or oneDNN, or
plain."""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from tranship.rollout.native.kernels import ADD, GATE, NOTHING, Kernels, ProductArguments


class Linear(Protocol):
    """x [N, I] times a weight [O, I], plus a bias [O] if there is one."""

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        """The product [N, O]."""
        ...

    def add(self, x_NI: torch.Tensor, other_NO: torch.Tensor) -> torch.Tensor:
        """The product plus `other_NO`."""
        ...

    def wide(self, x_NI: torch.Tensor) -> torch.Tensor:
        """The product in fp32, rounded before only where the kernel knows no other way."""
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

    def wide(self, x_NI: torch.Tensor) -> torch.Tensor:
        return self(x_NI).float()

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


class CompiledLinear:
    """A copy of the weight in the order that our compiled kernels read (CPU), and the product by them.

    gate: the weight is two, one below the other; a call then gives silu of the first product times the second.
    """

    def __init__(
        self, kernels: Kernels, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, gate: bool = False
    ) -> None:
        self._kernels = kernels
        self.weight = kernels.pack(weight_OI, gate)
        self.bias = None if bias_O is None else bias_O.clone()
        self._gate = gate
        self._columns, self._inner = weight_OI.shape

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        return self._product(x_NI, None, x_NI.dtype)

    def add(self, x_NI: torch.Tensor, other_NO: torch.Tensor) -> torch.Tensor:
        return self._product(x_NI, other_NO, x_NI.dtype)

    def wide(self, x_NI: torch.Tensor) -> torch.Tensor:
        return self._product(x_NI, None, torch.float32)

    def _product(self, x_NI: torch.Tensor, other_NO: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        if x_NI.stride(1) != 1 or x_NI.stride(0) * x_NI.element_size() % 4:
            x_NI = x_NI.contiguous()
        rows = x_NI.shape[0]
        out = torch.empty(rows, self._columns // 2 if self._gate else self._columns, dtype=dtype)
        if other_NO is not None:
            other_NO = other_NO.contiguous()
        self._kernels.product(
            ProductArguments(
                x=x_NI.data_ptr(),
                weight=self.weight.data_ptr(),
                bias=None if self.bias is None else self.bias.data_ptr(),
                other=None if other_NO is None else other_NO.data_ptr(),
                rows=rows,
                inner=self._inner,
                columns=self._columns,
                x_stride=x_NI.stride(0),
                wide=x_NI.dtype == torch.float32,
                wide_out=dtype == torch.float32,
                behind=GATE if self._gate else NOTHING if other_NO is None else ADD,
                out=out.data_ptr(),
            )
        )
        return out


class PlainLinear:
    """The weight as it is (devices other than a CPU, or a torch without oneDNN)."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        self._weight = weight_OI
        self._bias = bias_O

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        return functional.linear(x_NI, self._weight, self._bias)

    def add(self, x_NI: torch.Tensor, other_NO: torch.Tensor) -> torch.Tensor:
        return self(x_NI).add_(other_NO)

    def wide(self, x_NI: torch.Tensor) -> torch.Tensor:
        return self(x_NI).float()

    def silu(self, x_NI: torch.Tensor) -> torch.Tensor:
        return functional.silu(self(x_NI), inplace=True)

    def mul(self, x_NI: torch.Tensor, other_NO: torch.Tensor) -> torch.Tensor:
        return self(x_NI).mul_(other_NO)


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this torch and processor have oneDNN's packed product for `dtype`."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def make_linear(weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None, kernels: Kernels | None = None) -> Linear:
    """The fastest product for where the weight lies; kernels: there may be compiled ones."""
    if kernels is not None and kernels.has_product(weight_OI):
        return CompiledLinear(kernels, weight_OI, bias_O)
    return _torch_linear(weight_OI, bias_O)


def _torch_linear(weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> PackedLinear | PlainLinear:
    kind = PackedLinear if can_pack(weight_OI.dtype, weight_OI.device) else PlainLinear
    return kind(weight_OI, bias_O)


class Gated:
    """silu(gate x) times (up x), by two products."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> None:
        half = weight_OI.shape[0] // 2
        self._gate = _torch_linear(weight_OI[:half], None if bias_O is None else bias_O[:half])
        self._up = _torch_linear(weight_OI[half:], None if bias_O is None else bias_O[half:])

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        """[N, O / 2]."""
        return self._up.mul(x_NI, self._gate.silu(x_NI))


def make_gated(weight_OI: torch.Tensor, bias_O: torch.Tensor | None, kernels: Kernels | None) -> Gated | CompiledLinear:
    """A gate and what it gates, one below the other in the weight [O, I], as one function of x [N, I]: [N, O / 2]."""
    if kernels is not None and kernels.has_product(weight_OI):
        return CompiledLinear(kernels, weight_OI, bias_O, gate=True)
    return Gated(weight_OI, bias_O)


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x.expand(2, -1).contiguous()
