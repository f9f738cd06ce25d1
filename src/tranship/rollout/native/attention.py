"""The first half of a decoder layer, ready for its kernels: attention by heads, or over a latent.

The elements that a rotary embedding turns together are kept side by side, so that turning is one complex product; dot
products do not depend on the order.

Letters: N tokens, H hidden, Q query heads, D head_dim of the cache, S kept vectors of a token (keys and values of all
key heads, or one latent), I and O a product's input and output.
"""

from __future__ import annotations

from typing import Protocol

import torch

from tranship.rollout.native.kernels import Kernels
from tranship.rollout.native.linear import make_linear
from tranship.rollout.native.norm import RmsNorm, fold_norm
from tranship.rollout.native.ranks import Ranks
from tranship.rollout.native.shape import LatentShape, ModelShape
from tranship.rollout.native.summed import make_summed
from tranship.rollout.native.weights import Weights

LATENT_EPS = 1e-6
"""DeepSeek's norms over latents do not take the model's rms_norm_eps."""


class Attention(Protocol):
    """What stands before and behind the attention of one layer."""

    def project(
        self, x_NH: torch.Tensor, q_turns: torch.Tensor, k_turns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Turned and scaled queries [N, Q, D], and what the cache keeps [N, S, D]. Turning is done in fp32.

        k_turns: complex [N, 1, turned pairs], of each token's position; q_turns: the same times the scores' scale.
        """
        ...

    def parts(self, x_NH: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """The same, and whether queries and keys are turned and queries scaled; if not, that is left to the caller.

        What belongs to a row lies close together. turns: complex [N, 1, turned pairs], of each token's position.
        """
        ...

    def finish(self, x_NH: torch.Tensor, attended_NX: torch.Tensor) -> torch.Tensor:
        """x plus the output projection of what the queries attended to [N, Q D]."""
        ...


class HeadAttention:
    """Queries, keys and values by heads (Llama, Qwen)."""

    def __init__(
        self, shape: ModelShape, weights: Weights, own: str, kernels: Kernels | None, ranks: Ranks | None
    ) -> None:
        device = weights[f"{own}.qkv"].device
        order = _pair_order(shape.head_dim, device)
        rows = _row_order(shape, order)
        norm, qkv = fold_norm(weights[f"{own}.attn_norm"], weights[f"{own}.qkv"])
        bias = weights.get(f"{own}.qkv_bias")
        self._shape = shape
        self.norm = RmsNorm(norm, shape.norm_eps, device, kernels)
        self.qkv = make_linear(qkv[rows], None if bias is None else bias[rows], kernels)
        self.head_norm = _head_norm(shape, weights, own, order, kernels)
        self.o = make_summed(weights[f"{own}.o"], weights.get(f"{own}.o_bias"), kernels, ranks)

    def project(
        self, x_NH: torch.Tensor, q_turns: torch.Tensor, k_turns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys = self._shape.num_heads, self._shape.num_heads + self._shape.num_kv_heads
        wide_NXD = self._heads(x_NH).float()
        pairs = torch.view_as_complex(wide_NXD.unflatten(-1, (-1, 2)))
        q_NQD = torch.view_as_real(pairs[:, :queries] * q_turns).flatten(-2)
        pairs[:, queries:keys].mul_(k_turns)
        return q_NQD.to(x_NH.dtype), wide_NXD[:, queries:].to(x_NH.dtype)

    def parts(self, x_NH: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
        heads_NXD = self._heads(x_NH)
        return heads_NXD[:, : self._shape.num_heads], heads_NXD[:, self._shape.num_heads :], False

    def _heads(self, x_NH: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values [N, Q + S, D], before they are turned."""
        heads_NXD = self.qkv(self.norm(x_NH)).view(x_NH.shape[0], -1, self._shape.head_dim)
        if self.head_norm is not None:
            keys = self._shape.num_heads + self._shape.num_kv_heads
            heads_NXD[:, :keys] = self.head_norm(heads_NXD[:, :keys])
        return heads_NXD

    def finish(self, x_NH: torch.Tensor, attended_NX: torch.Tensor) -> torch.Tensor:
        return self.o.add(attended_NX, x_NH)


class LatentAttention:
    """Latent attention with the up-projections absorbed (DeepSeek-V2, section 2.1.2): queries are carried into the
    latent's space, all heads read the same latents, and what they read is carried back to the heads' values.

    A key is the normed latent and the turned rotary part; a value is the same vector, whose rotary part is passed over
    afterwards. fixed: products over heads do not depend, to the bit, on the number of tokens.
    """

    def __init__(
        self,
        shape: ModelShape,
        latent: LatentShape,
        weights: Weights,
        own: str,
        fixed: bool,
        kernels: Kernels | None,
        ranks: Ranks | None,
    ) -> None:
        down = weights[f"{own}.down_qkv"]
        device = down.device
        dim = latent.rope_dim
        order = torch.arange(dim, device=device) if latent.interleaved else _pair_order(dim, device)
        norm, down = fold_norm(weights[f"{own}.attn_norm"], down)
        bias = _latent_down_bias(shape, latent, weights, own)
        rows = _latent_down_rows(shape, latent, order)
        self._shape, self._latent = shape, latent
        self._norm = RmsNorm(norm, shape.norm_eps, device, kernels)
        self._down = make_linear(down[rows], None if bias is None else bias[rows], kernels)
        self._q_norm, self._q_up = None, None
        if latent.q_rank is not None:
            up = weights[f"{own}.q_up"][_latent_query_rows(shape, latent, order)]
            q_norm, up = fold_norm(weights[f"{own}.q_latent_norm"], up)
            self._q_norm, self._q_up = RmsNorm(q_norm, LATENT_EPS, device, kernels), make_linear(up, None, kernels)
        self._kv_norm = RmsNorm(weights[f"{own}.kv_latent_norm"], LATENT_EPS, device, kernels)
        up_QXR = weights[f"{own}.kv_up"].view(shape.num_heads, latent.nope_dim + latent.value_dim, latent.kv_rank)
        keys, values = up_QXR[:, : latent.nope_dim], up_QXR[:, latent.nope_dim :]
        self._to_latent = HeadProduct((keys.float() * shape.attention_scale).to(keys.dtype), fixed)
        self._to_values = HeadProduct(values.transpose(1, 2), fixed)
        self._o = make_summed(weights[f"{own}.o"], weights.get(f"{own}.o_bias"), kernels, ranks)

    def project(
        self, x_NH: torch.Tensor, q_turns: torch.Tensor, k_turns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        latent = self._latent
        down_NX = self._down(self._norm(x_NH))
        kept = latent.kv_rank + latent.rope_dim
        queries, kv_N1D = down_NX[:, :-kept], down_NX[:, None, -kept:]
        if self._q_norm is not None and self._q_up is not None:
            queries = self._q_up(self._q_norm(queries))
        q_NQX = queries.reshape(x_NH.shape[0], self._shape.num_heads, -1)
        # One product for queries and key: alone, the key's would split into vectors and a rest by the number of tokens,
        # and the two round differently.
        both = torch.cat([q_NQX[..., latent.nope_dim :], kv_N1D[..., latent.kv_rank :]], 1).float()
        pairs = torch.view_as_complex(both.unflatten(-1, (-1, 2))) * k_turns
        turned = torch.view_as_real(pairs).flatten(-2)
        turned[:, :-1] *= self._shape.attention_scale
        turned = turned.to(x_NH.dtype)
        q_NQD = torch.cat([self._to_latent(q_NQX[..., : latent.nope_dim]), turned[:, :-1]], -1)
        return q_NQD, torch.cat([self._kv_norm(kv_N1D[..., : latent.kv_rank]), turned[:, -1:]], -1)

    def parts(self, x_NH: torch.Tensor, turns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, bool]:
        return *self.project(x_NH, turns, turns), True

    def finish(self, x_NH: torch.Tensor, attended_NX: torch.Tensor) -> torch.Tensor:
        attended_NQD = attended_NX.view(x_NH.shape[0], self._shape.num_heads, -1)
        return self._o.add(self._to_values(attended_NQD[..., : self._latent.kv_rank]).flatten(1), x_NH)


class HeadProduct:
    """A matrix [Q, I, O] for each head. fixed: a row's result does not depend, to the bit, on how many there are."""

    def __init__(self, weight_QIO: torch.Tensor, fixed: bool) -> None:
        self._weight = None if fixed else weight_QIO.contiguous()
        self._heads = [make_linear(weight.t()) for weight in weight_QIO] if fixed else []

    def __call__(self, x_NQI: torch.Tensor) -> torch.Tensor:
        """[N, Q, O]."""
        if self._weight is None:
            return torch.stack([head(x_NQI[:, index].contiguous()) for index, head in enumerate(self._heads)], 1)
        return torch.bmm(x_NQI.transpose(0, 1), self._weight).transpose(0, 1)


def make_attention(
    shape: ModelShape, weights: Weights, own: str, fixed: bool, kernels: Kernels | None, ranks: Ranks | None
) -> Attention:
    """The attention of the layer whose storages are called `own`. fixed: see `LatentAttention`. kernels: for norms.

    shape: of what lies here. ranks: those that have the other heads.
    """
    if shape.latent is not None:
        return LatentAttention(shape, shape.latent, weights, own, fixed, kernels, ranks)
    return HeadAttention(shape, weights, own, kernels, ranks)


def _pair_order(dim: int, device: torch.device) -> torch.Tensor:
    """int64 [dim]: element i of the first half, then element i of the second, and so on."""
    return torch.arange(dim, device=device).view(2, -1).t().flatten()


def _row_order(shape: ModelShape, order: torch.Tensor) -> torch.Tensor:
    """int64: the rows of the fused projection, query and key heads reordered."""
    turned = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    starts = torch.arange(0, turned, shape.head_dim, device=order.device)
    values = torch.arange(turned, turned + shape.num_kv_heads * shape.head_dim, device=order.device)
    return torch.cat([(starts[:, None] + order).flatten(), values])


def _head_norm(
    shape: ModelShape, weights: Weights, own: str, order: torch.Tensor, kernels: Kernels | None
) -> RmsNorm | None:
    """The norm over each query and key head."""
    q_norm, k_norm = weights.get(f"{own}.q_norm"), weights.get(f"{own}.k_norm")
    if q_norm is None or k_norm is None:
        return None
    both = [q_norm[order].expand(shape.num_heads, -1), k_norm[order].expand(shape.num_kv_heads, -1)]
    return RmsNorm(torch.cat(both), shape.norm_eps, order.device, kernels)


def _latent_query_rows(shape: ModelShape, latent: LatentShape, order: torch.Tensor) -> torch.Tensor:
    """int64: the rows of the projection to queries, the rotary part of each head reordered."""
    head = torch.cat([torch.arange(latent.nope_dim, device=order.device), latent.nope_dim + order])
    starts = torch.arange(shape.num_heads, device=order.device) * len(head)
    return (starts[:, None] + head).flatten()


def _latent_down_rows(shape: ModelShape, latent: LatentShape, order: torch.Tensor) -> torch.Tensor:
    """int64: the rows of what reads the hidden state, rotary parts reordered."""
    queries = _latent_query_rows(shape, latent, order)
    if latent.q_rank is not None:
        queries = torch.arange(latent.q_rank, device=order.device)
    kept = torch.cat([torch.arange(latent.kv_rank, device=order.device), latent.kv_rank + order])
    return torch.cat([queries, len(queries) + kept])


def _latent_down_bias(shape: ModelShape, latent: LatentShape, weights: Weights, own: str) -> torch.Tensor | None:
    """The bias of what reads the hidden state: a direct projection to queries has none."""
    kept = weights.get(f"{own}.kv_a_proj_with_mqa_bias")
    if kept is None:
        return None
    queries = weights.get(f"{own}.q_a_proj_bias")
    if queries is None:
        queries = kept.new_zeros(shape.num_heads * (latent.nope_dim + latent.rope_dim))
    return torch.cat([queries, kept])
