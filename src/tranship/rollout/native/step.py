"""A decode step of a dense model as one call of the compiled kernels.

Letters: N rows, H hidden, D head_dim, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from tranship.rollout.native.attention import Attention, HeadAttention
from tranship.rollout.native.cache import KvTable
from tranship.rollout.native.decode_attention import DecodeRows, attend_arguments
from tranship.rollout.native.kernels import Kernels, LayerArguments, StepArguments
from tranship.rollout.native.linear import CompiledLinear, Linear
from tranship.rollout.native.mlp import DenseMlp, FeedForward
from tranship.rollout.native.norm import RmsNorm
from tranship.rollout.native.shape import ModelShape
from tranship.rollout.native.summed import WholeLogits


class CompiledStep:
    """The layers, final norm and head, with every weight packed for the kernels."""

    def __init__(
        self,
        shape: ModelShape,
        kernels: Kernels,
        layers: Sequence[tuple[HeadAttention, DenseMlp]],
        norm: RmsNorm,
        head: CompiledLinear,
    ) -> None:
        self._shape = shape
        self._kernels = kernels
        self._layers = (LayerArguments * len(layers))(*(_layer_arguments(*layer) for layer in layers))
        self._norm, self._head = norm, head
        self._held = tuple(layers)

    def __call__(
        self, x_NH: torch.Tensor, rows: DecodeRows, turns_N: torch.Tensor, prompts: KvTable, responses: KvTable
    ) -> torch.Tensor:
        """Logits float32 [N, V]; the new keys and values are in `responses`. x_NH, the embedded tokens, is written
        over. turns_N: complex [N, 1, D / 2], of each row's position."""
        shape, count = self._shape, len(x_NH)
        turns = torch.view_as_real(turns_N).flatten(1).contiguous()
        queries = shape.num_heads * shape.head_dim
        widths = (shape.hidden, queries + 2 * shape.num_kv_heads * shape.head_dim, queries, shape.mlp)
        normed, heads, attended, gated = torch.empty(count * sum(widths), dtype=x_NH.dtype).split(
            [count * width for width in widths]
        )
        storages = np.array([(*own, *shared) for own, shared in zip(responses.storages, prompts.storages, strict=True)])
        logits_NV = torch.empty(count, shape.vocab)
        arguments = StepArguments(
            attend=attend_arguments(shape, rows, prompts, responses),
            layers=ctypes.addressof(self._layers),
            storages=storages.ctypes.data,
            num_layers=shape.num_layers,
            rows=count,
            hidden=shape.hidden,
            mlp=shape.mlp,
            vocab=shape.vocab,
            eps=shape.norm_eps,
            norm=_address(self._norm.weight),
            head=self._head.weight.data_ptr(),
            x=x_NH.data_ptr(),
            normed=normed.data_ptr(),
            heads=heads.data_ptr(),
            attended=attended.data_ptr(),
            gated=gated.data_ptr(),
            logits=logits_NV.data_ptr(),
        )
        arguments.attend.wide = x_NH.dtype == torch.float32
        arguments.attend.turns = turns.data_ptr()
        self._kernels.step(arguments)
        return logits_NV


def compiled_step(
    shape: ModelShape,
    kernels: Kernels | None,
    layers: Sequence[tuple[Attention, FeedForward]],
    norm: RmsNorm,
    head: Linear | WholeLogits,
) -> CompiledStep | None:
    """The step, if kernels compute all of it: queries, keys and values by heads, one mlp for every token."""
    dense = [
        (attention, feed_forward)
        for attention, feed_forward in layers
        if isinstance(attention, HeadAttention) and isinstance(feed_forward, DenseMlp)
    ]
    if kernels is None or len(dense) < len(layers) or not isinstance(head, CompiledLinear):
        return None
    products = (product for layer in dense for product in _products(*layer))
    if not all(isinstance(product, CompiledLinear) for product in products):
        return None
    return CompiledStep(shape, kernels, dense, norm, head)


def _products(attention: HeadAttention, feed_forward: DenseMlp) -> tuple[object, ...]:
    return attention.qkv, attention.o, feed_forward.mlp.gated, feed_forward.mlp.down


def _layer_arguments(attention: HeadAttention, feed_forward: DenseMlp) -> LayerArguments:
    arguments = LayerArguments(
        attention_norm=_address(attention.norm.weight),
        head_norm=None if attention.head_norm is None else _address(attention.head_norm.weight),
        mlp_norm=_address(feed_forward.norm.weight),
    )
    for name, product in zip(("qkv", "o", "gate_up", "down"), _products(attention, feed_forward), strict=True):
        assert isinstance(product, CompiledLinear), product
        setattr(arguments, name, product.weight.data_ptr())
        setattr(arguments, f"{name}_bias", _address(product.bias))
    return arguments


def _address(tensor: torch.Tensor | None) -> int | None:
    """Of a contiguous tensor."""
    assert tensor is None or tensor.is_contiguous(), tensor
    return None if tensor is None else tensor.data_ptr()
