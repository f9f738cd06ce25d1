"""A decode step as one call of the compiled kernels: of models with attention by heads, dense or of routed experts.

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
from tranship.rollout.native.mlp import CompiledExperts, DenseMlp, ExpertMlp, FeedForward
from tranship.rollout.native.norm import RmsNorm
from tranship.rollout.native.shape import ModelShape
from tranship.rollout.native.summed import WholeLogits


class CompiledStep:
    """The layers, final norm and head, with every weight packed for the kernels."""

    def __init__(
        self,
        shape: ModelShape,
        kernels: Kernels,
        layers: Sequence[tuple[HeadAttention, DenseMlp | ExpertMlp]],
        norm: RmsNorm,
        head: CompiledLinear,
    ) -> None:
        self._shape = shape
        experts = [feed_forward.router.kind for _, feed_forward in layers if isinstance(feed_forward, ExpertMlp)]
        self._experts = experts[0] if experts else None
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
        sizes = [shape.hidden, queries + 2 * shape.num_kv_heads * shape.head_dim, queries, shape.mlp, 0, 0, 0]
        pairs = 0
        if self._experts is not None:
            pairs = self._experts.top_k
            sizes[3] = max(shape.mlp, pairs * self._experts.mlp)
            sizes[4:] = [self._experts.num_experts, pairs * shape.hidden, pairs * shape.hidden]
        room = torch.empty(count * sum(sizes), dtype=x_NH.dtype).split([count * size for size in sizes])
        normed, heads, attended, gated, scores, inputs, made = room
        chosen, shares = torch.empty(count, pairs, dtype=torch.int64), torch.empty(count, pairs)
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
            scores=scores.data_ptr(),
            chosen=chosen.data_ptr(),
            shares=shares.data_ptr(),
            inputs=inputs.data_ptr(),
            made=made.data_ptr(),
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
    """The step, if kernels compute all of it: queries, keys and values by heads, and one mlp for every token, or routed
    experts alone."""
    if kernels is None or not isinstance(head, CompiledLinear):
        return None
    known = []
    for attention, feed_forward in layers:
        if not isinstance(attention, HeadAttention) or not isinstance(feed_forward, DenseMlp | ExpertMlp):
            return None
        if not all(isinstance(product, CompiledLinear) for product in _products(attention, feed_forward)):
            return None
        if isinstance(feed_forward, ExpertMlp) and not _is_plain(feed_forward):
            return None
        known.append((attention, feed_forward))
    return CompiledStep(shape, kernels, known, norm, head)


def _is_plain(feed_forward: ExpertMlp) -> bool:
    router = feed_forward.router
    is_alone = feed_forward.shared is None and feed_forward.ranks is None
    return (
        is_alone
        and isinstance(feed_forward.routed, CompiledExperts)
        and router.is_plain
        and not router.kind.fp32_router
    )


def _products(attention: HeadAttention, feed_forward: DenseMlp | ExpertMlp) -> tuple[object, ...]:
    own = (attention.qkv, attention.o)
    if isinstance(feed_forward, ExpertMlp):
        return *own, feed_forward.router.product
    return *own, feed_forward.mlp.gated, feed_forward.mlp.down


def _layer_arguments(attention: HeadAttention, feed_forward: DenseMlp | ExpertMlp) -> LayerArguments:
    arguments = LayerArguments(
        attention_norm=_address(attention.norm.weight),
        head_norm=None if attention.head_norm is None else _address(attention.head_norm.weight),
        mlp_norm=_address(feed_forward.norm.weight),
    )
    names = ("qkv", "o", "router") if isinstance(feed_forward, ExpertMlp) else ("qkv", "o", "gate_up", "down")
    for name, product in zip(names, _products(attention, feed_forward), strict=True):
        assert isinstance(product, CompiledLinear), product
        setattr(arguments, name, product.weight.data_ptr())
        if name == "router":
            assert product.bias is None, "a router with a bias"
        else:
            setattr(arguments, f"{name}_bias", _address(product.bias))
    if isinstance(feed_forward, ExpertMlp):
        kind, experts = feed_forward.router.kind, feed_forward.routed
        assert isinstance(experts, CompiledExperts), experts
        arguments.experts_gate_up, arguments.experts_down = (places.data_ptr() for places in experts.places)
        arguments.num_experts, arguments.top_k, arguments.expert_mlp = kind.num_experts, kind.top_k, experts.mlp
        arguments.scale, arguments.normalised = kind.scale, kind.normalised
    return arguments


def _address(tensor: torch.Tensor | None) -> int | None:
    """Of a contiguous tensor."""
    assert tensor is None or tensor.is_contiguous(), tensor
    return None if tensor is None else tensor.data_ptr()
