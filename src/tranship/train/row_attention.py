"""Attention of a pack on a CPU: batched products with a gradient of our own.

Rows of a pack are short, and the flash kernel for CPUs costs several times as much on them. Only the packed queries,
keys and values are kept for the backward pass, which computes the scores again, tile by tile.
Letters: T packed tokens, H heads, K key-value heads, Z = H / K heads that share keys, D head size (that of values may
differ); a block has B rows of Q queries and S keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from tranship.train.attention_blocks import AttentionBlock, AttentionIndex

MAX_SCORE_BYTES = 32 << 20

# Longer rows go in steps of queries, so that the keys after a step are not computed to be masked.
MAX_QUERIES = 192
QUERY_STEP = 128


def row_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, index: AttentionIndex, scale: float
) -> torch.Tensor:
    """softmax(q k' scale + bias) v, [T, H, D], of query [T, H, D], key and value [T, K, D], in float32 throughout.

    The result and the gradients have the dtypes of their inputs.
    """
    return _RowAttention.apply(query, key, value, index, scale)


class _Tile(NamedTuple):
    """Some rows of a block, some of their queries, and the keys that those may see (a prefix)."""

    rows: slice
    queries: slice
    num_keys: int


class _RowAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, index: AttentionIndex, scale: float
    ) -> torch.Tensor:
        places: list[torch.Tensor] = []
        with torch.autocast("cpu", enabled=False):
            for block in index.blocks:
                q, k, v = _gathered(query, key, value, block)
                attended = q.new_empty(*q.shape[:4], v.shape[3])
                for tile in _tiles(q, k):
                    weights = _weights(q, k, block, tile, scale)
                    part = torch.bmm(weights, _flat_keys(v, tile))
                    attended[tile.rows, :, :, tile.queries] = part.view_as(attended[tile.rows, :, :, tile.queries])
                places.append(_to_rows(attended))
        ctx.save_for_backward(query, key, value)
        ctx.index, ctx.scale = index, scale
        return torch.cat(places).index_select(0, index.inverse).to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # pyrefly: ignore[bad-override]
        query, key, value = ctx.saved_tensors
        index: AttentionIndex = ctx.index
        # Padding gets a gradient of exactly 0 here, and so gives none to what its places were filled with.
        grad_places = grad.new_zeros(index.num_places, *grad.shape[1:], dtype=torch.float32)
        grad_places.index_copy_(0, index.inverse, grad.float())
        query_places: list[torch.Tensor] = []
        key_grad = torch.zeros(key.shape, dtype=torch.float32)
        value_grad = torch.zeros(value.shape, dtype=torch.float32)
        for block, block_grad in zip(
            index.blocks, grad_places.split([block.queries.numel() for block in index.blocks]), strict=True
        ):
            q, k, v = _gathered(query, key, value, block)
            g = _by_kv_head(block_grad.unflatten(0, block.queries.shape), k.shape[1])
            q_grad = torch.empty_like(q)
            k_grad, v_grad = torch.zeros_like(k), torch.zeros_like(v)
            for tile in _tiles(q, k):
                weights = _weights(q, k, block, tile, ctx.scale)
                g_tile, q_tile = _flat_queries(g, tile), _flat_queries(q, tile)
                _add_keys(v_grad, tile, torch.bmm(weights.transpose(1, 2), g_tile))
                weights_grad = torch.bmm(g_tile, _flat_keys(v, tile).transpose(1, 2))
                scores_grad = torch.ops.aten._softmax_backward_data(weights_grad, weights, -1, torch.float32)
                scores_grad.mul_(ctx.scale)
                part = torch.bmm(scores_grad, _flat_keys(k, tile))
                q_grad[tile.rows, :, :, tile.queries] = part.view_as(q_grad[tile.rows, :, :, tile.queries])
                _add_keys(k_grad, tile, torch.bmm(scores_grad.transpose(1, 2), q_tile))
            query_places.append(_to_rows(q_grad))
            key_grad.index_add_(0, block.keys.flatten(), _to_rows(k_grad[:, :, None]))
            value_grad.index_add_(0, block.keys.flatten(), _to_rows(v_grad[:, :, None]))
        query_grad = torch.cat(query_places).index_select(0, index.inverse)
        return query_grad.to(query.dtype), key_grad.to(key.dtype), value_grad.to(value.dtype), None, None


def _gathered(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: AttentionBlock
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float32 queries [B, K, Z, Q, D], keys and values [B, K, S, D] of a block."""
    kv_heads = key.shape[1]

    def gather(states: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        rows = states.index_select(0, places.flatten()).float().unflatten(0, places.shape)
        return _by_kv_head(rows, kv_heads)

    keys, values = (gather(states, block.keys)[:, :, 0] for states in (key, value))
    return gather(query, block.queries), keys, values


def _by_kv_head(rows: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[B, L, H, D] as contiguous [B, K, Z, L, D]: heads that share keys lie together."""
    grouped = rows.unflatten(2, (kv_heads, rows.shape[2] // kv_heads))
    return grouped.permute(0, 2, 3, 1, 4).contiguous()


def _to_rows(by_head: torch.Tensor) -> torch.Tensor:
    """[B, K, Z, L, D] as [B * L, H, D]."""
    batch, kv_heads, shared, length, size = by_head.shape
    return by_head.permute(0, 3, 1, 2, 4).reshape(batch * length, kv_heads * shared, size)


def _tiles(q: torch.Tensor, k: torch.Tensor) -> Iterator[_Tile]:
    """Tiles of a block whose scores fit MAX_SCORE_BYTES."""
    batch, kv_heads, shared, num_queries, _ = q.shape
    num_keys = k.shape[2]
    one_query = 4 * kv_heads * shared * num_keys
    step = num_queries if num_queries <= MAX_QUERIES else QUERY_STEP
    step = max(1, min(step, MAX_SCORE_BYTES // one_query))
    row_step = max(1, MAX_SCORE_BYTES // (one_query * step))
    for row in range(0, batch, row_step):
        for start in range(0, num_queries, step):
            stop = min(start + step, num_queries)
            yield _Tile(slice(row, min(row + row_step, batch)), slice(start, stop), num_keys - num_queries + stop)


def _flat_queries(q: torch.Tensor, tile: _Tile) -> torch.Tensor:
    """[rows * K, Z * queries, D] of [B, K, Z, Q, D]."""
    part = q[tile.rows, :, :, tile.queries]
    return part.reshape(part.shape[0] * part.shape[1], -1, part.shape[4])


def _flat_keys(k: torch.Tensor, tile: _Tile) -> torch.Tensor:
    """[rows * K, keys, D] of [B, K, S, D]."""
    return k[tile.rows].flatten(0, 1)[:, : tile.num_keys]


def _add_keys(grad: torch.Tensor, tile: _Tile, part: torch.Tensor) -> None:
    grad[tile.rows, :, : tile.num_keys] += part.unflatten(0, (-1, grad.shape[1]))


def _weights(q: torch.Tensor, k: torch.Tensor, block: AttentionBlock, tile: _Tile, scale: float) -> torch.Tensor:
    """Attention weights [rows * K, Z * queries, keys] of a tile."""
    scores = torch.bmm(_flat_queries(q, tile), _flat_keys(k, tile).transpose(1, 2)).mul_(scale)
    rows = slice(None) if block.bias.shape[0] == 1 else tile.rows
    bias = block.bias[rows, :, tile.queries, : tile.num_keys]
    scores.view(tile.rows.stop - tile.rows.start, -1, bias.shape[2], tile.num_keys).add_(bias)
    return torch.softmax(scores, dim=-1)
