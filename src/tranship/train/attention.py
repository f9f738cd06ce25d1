"""Attention over a pack: a response token sees its prompt and the tokens of its own response before it, nothing else.

Registered with transformers under ATTENTION, so any model that routes attention through its interface runs packed.
Letters: T packed tokens, H heads, K key-value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from tranship.train.attention_blocks import AttentionIndex
from tranship.train.row_attention import row_attention
from tranship.types import UserError

ATTENTION = "tranship_packed"


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
    if sliding_window is not None and packed_index.longest_row > sliding_window:
        raise UserError(
            f"this model attends over a sliding window of {sliding_window} tokens, and a row has "
            f"{packed_index.longest_row}: use shorter prompts and responses, or another model"
        )
    for option in ("softcap", "s_aux", "position_bias"):
        if options.get(option) is not None:
            raise UserError(f"this model's attention uses {option}, which packed training does not support")
    if value.dtype != query.dtype:
        # Rotary embeddings leave autocast's dtype; attention runs in the one the projections gave.
        query, key = query.to(value.dtype), key.to(value.dtype)
    attend = row_attention if query.device.type == "cpu" else sdpa_attention
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
    packed = attend(q, k, v, packed_index, scale)
    return packed[None], None


def sdpa_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, index: AttentionIndex, scale: float
) -> torch.Tensor:
    """What row_attention gives, by torch's own kernels."""
    shared = query.shape[1] // key.shape[1]
    places: list[torch.Tensor] = []
    for block in index.blocks:
        q, k, v = (
            states.index_select(0, chosen.flatten()).unflatten(0, chosen.shape).transpose(1, 2)
            for states, chosen in ((query, block.queries), (key, block.keys), (value, block.keys))
        )
        # With a mask, the memory-saving kernels take no shared heads.
        k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=block.bias.to(q.dtype), scale=scale)
        places.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(places).index_select(0, index.inverse)


AttentionInterface.register(ATTENTION, packed_attention)
