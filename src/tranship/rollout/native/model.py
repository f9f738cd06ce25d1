"""The forward pass of a dense decoder: packed whole sequences (prefill, probe), or one token of each slot (decode).

Query and key heads are kept in an order in which the two halves that a rotary embedding turns lie side by side, so
that turning is one complex product; dot products do not depend on the order.

Letters: N tokens (packed) or rows (decode), H hidden, Q query heads, G key heads, R = Q / G, D head_dim, T columns,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from tranship.rollout.native.cache import KvTable
from tranship.rollout.native.linear import Linear, can_pack, make_linear
from tranship.rollout.native.shape import ModelShape
from tranship.rollout.native.weights import Weights

FIXED_COLUMNS = 128
"""In deterministic mode attention reads keys and values in blocks of this width, so that no product's shape depends
on how long the neighbours are."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence: int32 [L], from position `start` on.

    past: for each layer the keys and values [2, G, start, D] of what came before; None where start is 0.
    """

    token_ids: np.ndarray
    start: int = 0
    past: Sequence[torch.Tensor] | None = None


@dataclass(frozen=True)
class DecodeRows:
    """What one decode step runs: int64 tensors.

    token_N: the tokens. column_N: where each lies in its response. prompt_length_N. num_prompts: prompts that are
    read. to_prompt [num_prompts x G x W]: for each prompt, key head and place (W: the most rows that share a prompt)
    the row and key head (row x G + head) that stands there, any one where none does. to_row [N x G]: the inverse.
    """

    token_N: torch.Tensor
    column_N: torch.Tensor
    prompt_length_N: torch.Tensor
    num_prompts: int
    to_prompt: torch.Tensor
    to_row: torch.Tensor


@dataclass(frozen=True)
class Layer:
    """One decoder layer, ready for its kernels. A norm's weight is None where the next matrix holds it."""

    attn_norm: torch.Tensor | None
    qkv: Linear
    qk_norm: torch.Tensor | None
    o: Linear
    mlp_norm: torch.Tensor | None
    gate: Linear
    up: Linear
    down: Linear


@dataclass(frozen=True)
class Prepared:
    """All weights, ready for their kernels."""

    embed: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: Linear


class Model:
    """Prepared weights and the passes over them. `prepare` must follow every change of the weights."""

    def __init__(self, shape: ModelShape, device: torch.device, max_tokens: int, fixed_columns: bool) -> None:
        self._shape = shape
        self._device = device
        self._fixed_columns = fixed_columns
        angles = torch.arange(max_tokens + 1, dtype=torch.float32)[:, None] * shape.rope_frequencies
        turns = torch.polar(torch.full_like(angles, shape.rope_scale), angles)
        self._turns = turns.to(device)[:, None]
        self._scale = shape.head_dim**-0.5
        self._eps = torch.full((1, 1), shape.norm_eps, device=device)
        self._prepared: Prepared | None = None

    def free(self) -> None:
        """Drop the prepared weights."""
        self._prepared = None

    @property
    def _ready(self) -> Prepared:
        assert self._prepared is not None, "the weights are not prepared"
        return self._prepared

    def prepare(self, weights: Weights) -> None:
        """Pack the weights for the kernels; the embedding and vectors are read where they lie.

        What was packed before goes first: two packed copies at a time would be the engine's peak.
        """
        self.free()
        self._prepared = Prepared(
            embed=weights["embed"],
            layers=tuple(self._prepare_layer(weights, f"layers.{index}") for index in range(self._shape.num_layers)),
            norm=weights["norm"],
            head=make_linear(weights["embed" if self._shape.tied else "lm_head"]),
        )

    def _prepare_layer(self, weights: Weights, own: str) -> Layer:
        mlp = self._shape.mlp
        order = self._head_order()
        rows = self._row_order(order)
        attn_norm, qkv = self._fold(weights[f"{own}.attn_norm"], weights[f"{own}.qkv"])
        mlp_norm, gate_up = self._fold(weights[f"{own}.mlp_norm"], weights[f"{own}.gate_up"])
        qkv_bias, gate_up_bias = weights.get(f"{own}.qkv_bias"), weights.get(f"{own}.gate_up_bias")
        return Layer(
            attn_norm=attn_norm,
            qkv=make_linear(qkv[rows], None if qkv_bias is None else qkv_bias[rows]),
            qk_norm=self._head_norms(weights, own, order),
            o=make_linear(weights[f"{own}.o"], weights.get(f"{own}.o_bias")),
            mlp_norm=mlp_norm,
            gate=make_linear(gate_up[:mlp], None if gate_up_bias is None else gate_up_bias[:mlp]),
            up=make_linear(gate_up[mlp:], None if gate_up_bias is None else gate_up_bias[mlp:]),
            down=make_linear(weights[f"{own}.down"], weights.get(f"{own}.down_bias")),
        )

    def _fold(self, norm: torch.Tensor, weight_OI: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """A norm's weight and the matrix behind it: one matrix where that is exact enough (fp32) and copied anyway."""
        if weight_OI.dtype != torch.float32 or not can_pack(weight_OI.dtype, self._device):
            return norm, weight_OI
        return None, weight_OI * norm

    def _head_norms(self, weights: Weights, own: str, order: torch.Tensor) -> torch.Tensor | None:
        """[Q + G, D]: the weights of the norms over each query and key head."""
        q_norm, k_norm = weights.get(f"{own}.q_norm"), weights.get(f"{own}.k_norm")
        if q_norm is None or k_norm is None:
            return None
        shape = self._shape
        return torch.cat([q_norm[order].expand(shape.num_heads, -1), k_norm[order].expand(shape.num_kv_heads, -1)])

    def _head_order(self) -> torch.Tensor:
        """int64 [D]: element i of the first half, then element i of the second, and so on."""
        return torch.arange(self._shape.head_dim, device=self._device).view(2, -1).t().flatten()

    def _row_order(self, order: torch.Tensor) -> torch.Tensor:
        """int64 [(Q + 2 G) D]: the rows of the fused projection, query and key heads reordered."""
        shape = self._shape
        turned = (shape.num_heads + shape.num_kv_heads) * shape.head_dim
        starts = torch.arange(0, turned, shape.head_dim, device=self._device)
        values = torch.arange(turned, turned + shape.num_kv_heads * shape.head_dim, device=self._device)
        return torch.cat([(starts[:, None] + order).flatten(), values])

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """[N, V] of final hidden states."""
        return self._ready.head(hidden_NH)

    def prefill(self, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run several chunks, packed one after the other; no token sees another chunk.

        Returns the final hidden states [N, H], and for each layer the keys and values [N, 2 G, D].
        """
        tokens_N = torch.from_numpy(np.concatenate([chunk.token_ids for chunk in chunks]).astype(np.int64))
        positions = [np.arange(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in chunks]
        positions_N = torch.from_numpy(np.concatenate(positions))
        turns_N = self._turns[positions_N.to(self._device)]
        masks = [self._chunk_mask(chunk) for chunk in chunks]
        x_NH = functional.embedding(tokens_N.to(self._device), self._ready.embed)
        kept = []
        for index, layer in enumerate(self._ready.layers):
            q_NQD, kv_N2GD = self._project(layer, x_NH, turns_N * self._scale, turns_N)
            kept.append(kv_N2GD)
            out = []
            at = 0
            for chunk, mask in zip(chunks, masks, strict=True):
                tokens = slice(at, at + len(chunk.token_ids))
                past = None if chunk.past is None else chunk.past[index]
                out.append(self._attend_chunk(q_NQD[tokens], kv_N2GD[tokens], past, mask))
                at = tokens.stop
            x_NH = self._finish_layer(layer, x_NH, torch.cat(out) if len(out) > 1 else out[0])
        return self._rms(x_NH, self._ready.norm), kept

    def _chunk_mask(self, chunk: Chunk) -> torch.Tensor | None:
        if chunk.past is None:
            return None
        length = len(chunk.token_ids)
        shape = (length, chunk.start + length)
        return torch.ones(shape, dtype=torch.bool, device=self._device).tril_(chunk.start)

    def _attend_chunk(
        self, q_LQD: torch.Tensor, kv_L2GD: torch.Tensor, past_2GTD: torch.Tensor | None, mask: torch.Tensor | None
    ) -> torch.Tensor:
        heads = self._shape.num_kv_heads
        keys, values = kv_L2GD[:, :heads].transpose(0, 1), kv_L2GD[:, heads:].transpose(0, 1)
        if past_2GTD is not None:
            keys, values = torch.cat([past_2GTD[0], keys], 1), torch.cat([past_2GTD[1], values], 1)
        out_1QLD = functional.scaled_dot_product_attention(
            q_LQD.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=1.0,
            enable_gqa=True,
        )
        return out_1QLD[0].transpose(0, 1).flatten(1)

    def decode(self, rows: DecodeRows, prompts: KvTable, responses: KvTable) -> torch.Tensor:
        """Run one token of each of rows 0..N-1 of `responses` and keep its keys and values; returns the logits [N, V].

        The tables must have room for it.
        """
        turns_N = self._turns.index_select(0, rows.prompt_length_N + rows.column_N)
        scaled_N = turns_N * self._scale
        index = responses.append_index(rows.column_N)
        mask_N1T = self._decode_mask(rows, prompts.columns, responses.columns)
        x_NH = functional.embedding(rows.token_N, self._ready.embed)
        shared, own = prompts.read(rows.num_prompts), responses.read(len(rows.token_N))
        for number, layer in enumerate(self._ready.layers):
            q_NQD, kv_N2GD = self._project(layer, x_NH, scaled_N, turns_N)
            responses.flat(number).index_put_((index,), kv_N2GD)
            x_NH = self._finish_layer(layer, x_NH, self._attend(q_NQD, shared[number], own[number], mask_N1T, rows))
        return self._ready.head(self._rms(x_NH, self._ready.norm))

    def _decode_mask(self, rows: DecodeRows, prompt_columns: int, response_columns: int) -> torch.Tensor:
        """[N, 1, P + T]: 0 for the row's own prompt and its response up to now, else -inf."""
        beyond = torch.arange(prompt_columns, device=self._device) >= rows.prompt_length_N[:, None]
        later = torch.arange(response_columns, device=self._device) > rows.column_N[:, None]
        hidden = torch.cat([beyond, later], 1)
        mask = torch.zeros(hidden.shape, dtype=self._ready.embed.dtype, device=self._device)
        return mask.masked_fill_(hidden, float("-inf"))[:, None]

    def _attend(
        self,
        q_NQD: torch.Tensor,
        prompts: tuple[torch.Tensor, torch.Tensor],
        responses: tuple[torch.Tensor, torch.Tensor],
        mask_N1T: torch.Tensor,
        rows: DecodeRows,
    ) -> torch.Tensor:
        """Each row's attention over its prompt and its response [N, Q D].

        A prompt is read once for all rows that share it: their queries are gathered below each other. prompts: keys
        [num_prompts G, D, P] and values [num_prompts G, P, D]; responses: [N G, D, T] and [N G, T, D].
        """
        count, repeat, dim = q_NQD.shape[0], self._shape.heads_per_kv, self._shape.head_dim
        blocks, _, columns = prompts[0].shape
        q = q_NQD.reshape(-1, repeat * dim)
        q_shared = q.index_select(0, rows.to_prompt).view(blocks, -1, dim)
        shared = self._scores(q_shared, prompts[0]).view(-1, repeat * columns)
        shared = shared.index_select(0, rows.to_row).view(-1, repeat, columns)
        scores = torch.cat([shared, self._scores(q.view(-1, repeat, dim), responses[0])], -1)
        scores.view(count, -1, mask_N1T.shape[-1]).add_(mask_N1T)
        probs = torch.softmax(scores, -1)
        weights = probs[..., :columns].index_select(0, rows.to_prompt).view(blocks, -1, columns)
        out = self._weigh(None, weights, prompts[1]).view(-1, repeat * dim)
        out = out.index_select(0, rows.to_row).view(-1, repeat, dim)
        return self._weigh(out, probs[..., columns:], responses[1]).view(count, -1)

    def _scores(self, q: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Batched q [., M, D] times keys [., D, T]."""
        if not self._fixed_columns:
            return torch.bmm(q, keys)
        return torch.cat([torch.bmm(q, block) for block in keys.split(FIXED_COLUMNS, 2)], 2)

    def _weigh(self, start: torch.Tensor | None, probs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Batched probs [., M, T] times values [., T, D], added to `start` in place."""
        if not self._fixed_columns:
            return torch.bmm(probs, values) if start is None else start.baddbmm_(probs, values)
        for part, block in zip(probs.split(FIXED_COLUMNS, 2), values.split(FIXED_COLUMNS, 1), strict=True):
            start = torch.bmm(part, block) if start is None else start.baddbmm_(part, block)
        assert start is not None, "no columns"
        return start

    def _project(
        self, layer: Layer, x_NH: torch.Tensor, q_turns: torch.Tensor, k_turns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Turned and scaled queries [N, Q, D]; turned keys, then values [N, 2 G, D]. Turning is done in fp32."""
        queries, keys = self._shape.num_heads, self._shape.num_heads + self._shape.num_kv_heads
        heads_NXD = layer.qkv(self._rms(x_NH, layer.attn_norm)).view(x_NH.shape[0], -1, self._shape.head_dim)
        if layer.qk_norm is not None:
            heads_NXD[:, :keys] = self._rms(heads_NXD[:, :keys], layer.qk_norm)
        wide_NXD = heads_NXD.float()
        pairs = torch.view_as_complex(wide_NXD.unflatten(-1, (-1, 2)))
        q_NQD = torch.view_as_real(pairs[:, :queries] * q_turns).flatten(-2)
        pairs[:, queries:keys].mul_(k_turns)
        return q_NQD.to(x_NH.dtype), wide_NXD[:, queries:].to(x_NH.dtype)

    def _finish_layer(self, layer: Layer, x_NH: torch.Tensor, attended_NX: torch.Tensor) -> torch.Tensor:
        x_NH = layer.o.add(attended_NX, x_NH)
        normed_NH = self._rms(x_NH, layer.mlp_norm)
        return layer.down.add(layer.up.mul(normed_NH, layer.gate.silu(normed_NH)), x_NH)

    def _rms(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """x over its root mean square (last dim, in fp32), times the weight if it is not in a matrix already."""
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._eps, size, size, value=1 / x.shape[-1]).rsqrt_()
        out = torch.mul(x, scale, out=torch.empty(x.shape, dtype=x.dtype, device=x.device))
        return out if weight is None else out.mul_(weight)
