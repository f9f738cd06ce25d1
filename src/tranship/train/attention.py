"""Attention over a pack: a response token sees its prompt and the tokens of its own response before it, nothing else.

Registered with transformers under ATTENTION, so any model that routes attention through its interface runs packed.
Two ways to the same numbers: on a CPU, batched products with a gradient of our own (a group's rows are short, and the
flash kernel there costs several times as much); elsewhere, and where scores would take too much memory, SDPA.
Letters: T packed tokens, H heads, K key-value heads, Z = H / K heads that share keys, D head size; the rest as in
`packing`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from transformers import AttentionInterface

from tranship.train.packing import AttentionIndex
from tranship.types import UserError

ATTENTION = "tranship_packed"

# Scores of as many (sample, key-value head) pairs as fit are held at once; a pair that alone is larger goes to SDPA.
MAX_SCORE_BYTES = 32 << 20


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    packed_index: AttentionIndex,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """(attended [1, T, H, D], None) of query [1, H, T, D], key and value [1, K, T, D] under the pack's own mask.

    The signature is transformers' AttentionInterface. Raises UserError for what no pack can honour yet: a sliding
    window shorter than the longest row, soft-capped scores, attention sinks, a position bias.
    """
    assert attention_mask is None, "a pack brings its own mask"
    index = packed_index
    if sliding_window is not None and index.longest_row > sliding_window:
        raise UserError(
            f"this model attends over a sliding window of {sliding_window} tokens, and a row has {index.longest_row}: "
            "use shorter prompts and responses, or another model"
        )
    for option in ("softcap", "s_aux", "position_bias"):
        if options.get(option) is not None:
            raise UserError(f"this model's attention uses {option}, which packed training does not support")
    if value.dtype != query.dtype:
        # Rotary embeddings leave autocast's dtype; attention runs in the one the projections gave.
        query, key = query.to(value.dtype), key.to(value.dtype)
    queries, keys, values = (
        _Pad.apply(states[0].transpose(0, 1), index.gather, index.inverse) for states in (query, key, value)
    )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    padded = _attend(queries, keys, values, index, scale)
    return _Unpad.apply(padded, index.inverse, index.gather)[None], None


class _Pad(torch.autograd.Function):
    """Packed [T, ...] to padded places [S, ...]; both ways are plain gathers, since each packed token has one place."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, gather: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return packed.index_select(0, gather)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class _Unpad(torch.autograd.Function):
    """Padded places [S, ...] to packed [T, ...]; no gradient reaches padding."""

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, inverse: torch.Tensor, gather: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        ctx.num_places = len(gather)
        return padded.index_select(0, inverse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (inverse,) = ctx.saved_tensors
        return grad.new_zeros(ctx.num_places, *grad.shape[1:]).index_copy_(0, inverse, grad), None, None


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, index: AttentionIndex, scale: float
) -> torch.Tensor:
    """Attended [S, H, D] of padded queries [S, H, D], keys and values [S, K, D]; S = G * P + N * R."""
    split = index.num_prompts * index.prompt_width
    prompt_shape = (index.num_prompts, index.prompt_width)
    prompt_q, prompt_k, prompt_v = (x[:split].unflatten(0, prompt_shape) for x in (queries, keys, values))
    attended = _attend_rows(prompt_q, prompt_k, prompt_v, index.prompt_bias, scale).flatten(0, 1)
    if not index.response_width:
        return attended
    response_shape = (index.num_samples, index.response_width)
    own_q, own_k, own_v = (x[split:].unflatten(0, response_shape) for x in (queries, keys, values))
    seen_k = torch.cat([_Repeat.apply(prompt_k, index.group_of), own_k], dim=1)
    seen_v = torch.cat([_Repeat.apply(prompt_v, index.group_of), own_v], dim=1)
    responses = _attend_rows(own_q, seen_k, seen_v, index.response_bias, scale)
    return torch.cat([attended, responses.flatten(0, 1)])


class _Repeat(torch.autograd.Function):
    """Rows of the prompts [G, ...] for their samples [N, ...]; backward sums them by one product with a 0/1 matrix."""

    @staticmethod
    def forward(ctx: Any, prompts: torch.Tensor, group_of: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(group_of)
        ctx.num_prompts = len(prompts)
        return prompts.index_select(0, group_of)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (group_of,) = ctx.saved_tensors
        belongs = F.one_hot(group_of, ctx.num_prompts).T.float()
        return (belongs @ grad.flatten(1).float()).view(ctx.num_prompts, *grad.shape[1:]).to(grad.dtype), None


def _attend_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attended [B, Q, H, D] of query [B, Q, H, D], key and value [B, S, K, D]; the D of value may differ.

    bias: [B or 1, 1, Q, S], added to the scores.
    """
    heads = query.shape[2]
    if query.device.type == "cpu" and 4 * heads * query.shape[1] * key.shape[1] <= MAX_SCORE_BYTES:
        return _RowAttention.apply(query, key, value, bias, scale)
    shared = heads // key.shape[2]
    if query.device.type != "cpu":
        # With a mask, the memory-saving kernels of accelerators take no shared heads.
        key, value, shared = key.repeat_interleave(shared, dim=2), value.repeat_interleave(shared, dim=2), 1
    attended = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=bias.to(query.dtype),
        scale=scale,
        enable_gqa=shared > 1,
    )
    return attended.transpose(1, 2)


class _RowAttention(torch.autograd.Function):
    """softmax(q k' scale + bias) v by batched products in float32; the backward pass computes the scores again."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scale: float
    ) -> torch.Tensor:
        kv_heads = key.shape[2]
        with torch.autocast(query.device.type, enabled=False):
            q, k, v = (_by_kv_head(x, kv_heads) for x in (query, key, value))
            attended = q.new_empty(*q.shape[:2], v.shape[2])
            for rows in _blocks(query, key):
                pairs = slice(rows.start * kv_heads, rows.stop * kv_heads)
                torch.bmm(_weights(q[pairs], k[pairs], bias, rows, scale), v[pairs], out=attended[pairs])
        ctx.save_for_backward(query, key, value, bias)
        ctx.scale = scale
        return _from_kv_head(attended, *query.shape[:3]).to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, bias = ctx.saved_tensors
        kv_heads = key.shape[2]
        q, k, v, g = (_by_kv_head(x, kv_heads) for x in (query, key, value, grad))
        q_grad, k_grad, v_grad = (torch.empty_like(x) for x in (q, k, v))
        for rows in _blocks(query, key):
            pairs = slice(rows.start * kv_heads, rows.stop * kv_heads)
            weights = _weights(q[pairs], k[pairs], bias, rows, ctx.scale)
            torch.bmm(weights.transpose(1, 2), g[pairs], out=v_grad[pairs])
            weights_grad = torch.bmm(g[pairs], v[pairs].transpose(1, 2))
            scores_grad = torch.ops.aten._softmax_backward_data(weights_grad, weights, -1, torch.float32)
            scores_grad.mul_(ctx.scale)
            torch.bmm(scores_grad, k[pairs], out=q_grad[pairs])
            torch.bmm(scores_grad.transpose(1, 2), q[pairs], out=k_grad[pairs])
        return (
            _from_kv_head(q_grad, *query.shape[:3]).to(query.dtype),
            _from_kv_head(k_grad, *key.shape[:3]).to(key.dtype),
            _from_kv_head(v_grad, *value.shape[:3]).to(value.dtype),
            None,
            None,
        )


def _by_kv_head(rows: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[B, L, H, D] as contiguous float32 [B * K, Z * L, D]: heads that share keys lie together."""
    batch, length, heads, size = rows.shape
    grouped = rows.float().unflatten(2, (kv_heads, heads // kv_heads)).permute(0, 2, 3, 1, 4)
    return grouped.reshape(batch * kv_heads, heads // kv_heads * length, size)


def _from_kv_head(by_head: torch.Tensor, batch: int, length: int, heads: int) -> torch.Tensor:
    """The inverse of _by_kv_head: [B * K, Z * L, D] as [B, L, H, D]."""
    kv_heads, size = by_head.shape[0] // batch, by_head.shape[2]
    rows = by_head.view(batch, kv_heads, heads // kv_heads, length, size).permute(0, 3, 1, 2, 4)
    return rows.reshape(batch, length, heads, size)


def _blocks(query: torch.Tensor, key: torch.Tensor) -> list[slice]:
    """Runs of rows whose scores fit MAX_SCORE_BYTES."""
    batch, length, heads, _ = query.shape
    step = max(1, MAX_SCORE_BYTES // (4 * heads * length * key.shape[1]))
    return [slice(start, min(start + step, batch)) for start in range(0, batch, step)]


def _weights(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor, rows: slice, scale: float) -> torch.Tensor:
    """Attention weights [pairs, Z * Q, S] of the (row, key-value head) pairs of some rows."""
    scores = torch.bmm(q, k.transpose(1, 2)).mul_(scale)
    row_bias = bias if bias.shape[0] == 1 else bias[rows]
    count, length = rows.stop - rows.start, bias.shape[2]
    scores.view(count, -1, length, bias.shape[3]).add_(row_bias)
    return torch.softmax(scores, dim=-1)


AttentionInterface.register(ATTENTION, packed_attention)
