"""Attention over a pack: a response token sees its prompt and the tokens of its own response before it, nothing else.

Registered with transformers under ATTENTION, so any model that routes attention through its interface runs packed.
Letters: T packed tokens, H heads, K key-value heads, D head size; the rest as in `packing`.
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
    padded = _attend(queries, keys, values, index, scaling)
    return padded.index_select(0, index.inverse)[None], None


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, index: AttentionIndex, scaling: float | None
) -> torch.Tensor:
    """Attended [S, H, D] of padded queries [S, H, D], keys and values [S, K, D]; S = G * P + N * R."""
    split = index.num_prompts * index.prompt_width
    prompt_shape = (index.num_prompts, index.prompt_width)
    prompt_q, prompt_k, prompt_v = (
        x[:split].unflatten(0, prompt_shape).transpose(1, 2) for x in (queries, keys, values)
    )
    gqa = queries.shape[1] != keys.shape[1]
    prompts = F.scaled_dot_product_attention(
        prompt_q, prompt_k, prompt_v, is_causal=True, scale=scaling, enable_gqa=gqa
    )
    attended = prompts.transpose(1, 2).flatten(0, 1)
    if not index.response_width:
        return attended
    response_shape = (index.num_samples, index.response_width)
    own_q, own_k, own_v = (x[split:].unflatten(0, response_shape).transpose(1, 2) for x in (queries, keys, values))
    seen_k = torch.cat([prompt_k.index_select(0, index.group_of), own_k], dim=2)
    seen_v = torch.cat([prompt_v.index_select(0, index.group_of), own_v], dim=2)
    responses = F.scaled_dot_product_attention(
        own_q, seen_k, seen_v, attn_mask=index.response_mask, scale=scaling, enable_gqa=gqa
    )
    return torch.cat([attended, responses.transpose(1, 2).flatten(0, 1)])


AttentionInterface.register(ATTENTION, packed_attention)
