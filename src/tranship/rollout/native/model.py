"""The forward pass of a decoder: packed whole sequences (prefill, probe), or one token of each slot (decode).

Letters: N tokens (packed) or rows (decode), H hidden, Q query heads, G key heads, R = Q / G, D head_dim of the cache,
S kept vectors of a token (keys and values of all key heads, or one latent), T columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from tranship.rollout.native.attention import Attention, make_attention
from tranship.rollout.native.cache import KvTable
from tranship.rollout.native.linear import Linear, make_linear
from tranship.rollout.native.mlp import FeedForward, make_feed_forward
from tranship.rollout.native.norm import RmsNorm
from tranship.rollout.native.shape import ModelShape
from tranship.rollout.native.weights import Weights

FIXED_COLUMNS = 128
"""In deterministic mode attention reads keys and values in blocks of this width, so that no product's shape depends
on how long the neighbours are."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence: int32 [L], from position `start` on.

    past: for each layer the keys and values [sides, G, start, D] of what came before; None where start is 0.
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
class Prepared:
    """All weights, ready for their kernels."""

    embed: torch.Tensor
    layers: tuple[tuple[Attention, FeedForward], ...]
    norm: RmsNorm
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
        self._scale = shape.attention_scale
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
        shape = self._shape
        self._prepared = Prepared(
            embed=weights["embed"],
            layers=tuple(self._prepare_layer(weights, index) for index in range(shape.num_layers)),
            norm=RmsNorm(weights["norm"], shape.norm_eps, self._device),
            head=make_linear(weights["embed" if shape.tied else "lm_head"]),
        )

    def _prepare_layer(self, weights: Weights, index: int) -> tuple[Attention, FeedForward]:
        own = f"layers.{index}"
        attention = make_attention(self._shape, weights, own, fixed=self._fixed_columns)
        return attention, make_feed_forward(self._shape, weights, index)

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """[N, V] of final hidden states."""
        return self._ready.head(hidden_NH)

    def prefill(self, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run several chunks, packed one after the other; no token sees another chunk.

        Returns the final hidden states [N, H], and for each layer what the cache keeps [N, S G, D].
        """
        tokens_N = torch.from_numpy(np.concatenate([chunk.token_ids for chunk in chunks]).astype(np.int64))
        positions = [np.arange(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in chunks]
        positions_N = torch.from_numpy(np.concatenate(positions))
        turns_N = self._turns[positions_N.to(self._device)]
        masks = [self._chunk_mask(chunk) for chunk in chunks]
        x_NH = functional.embedding(tokens_N.to(self._device), self._ready.embed)
        kept = []
        for index, (attention, feed_forward) in enumerate(self._ready.layers):
            q_NQD, kv_NSD = attention.project(x_NH, turns_N * self._scale, turns_N)
            kept.append(kv_NSD)
            out = []
            at = 0
            for chunk, mask in zip(chunks, masks, strict=True):
                tokens = slice(at, at + len(chunk.token_ids))
                past = None if chunk.past is None else chunk.past[index]
                out.append(self._attend_chunk(q_NQD[tokens], kv_NSD[tokens], past, mask))
                at = tokens.stop
            x_NH = feed_forward(attention.finish(x_NH, torch.cat(out) if len(out) > 1 else out[0]))
        return self._ready.norm(x_NH), kept

    def _chunk_mask(self, chunk: Chunk) -> torch.Tensor | None:
        if chunk.past is None:
            return None
        length = len(chunk.token_ids)
        shape = (length, chunk.start + length)
        return torch.ones(shape, dtype=torch.bool, device=self._device).tril_(chunk.start)

    def _attend_chunk(
        self, q_LQD: torch.Tensor, kv_LSD: torch.Tensor, past_SGTD: torch.Tensor | None, mask: torch.Tensor | None
    ) -> torch.Tensor:
        heads = self._shape.num_kv_heads
        keys, values = kv_LSD[:, :heads].transpose(0, 1), kv_LSD[:, -heads:].transpose(0, 1)
        if past_SGTD is not None:
            keys, values = torch.cat([past_SGTD[0], keys], 1), torch.cat([past_SGTD[-1], values], 1)
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
        for number, (attention, feed_forward) in enumerate(self._ready.layers):
            q_NQD, kv_NSD = attention.project(x_NH, scaled_N, turns_N)
            responses.flat(number).index_put_((index,), kv_NSD)
            x_NH = feed_forward(
                attention.finish(x_NH, self._attend(q_NQD, shared[number], own[number], mask_N1T, rows))
            )
        return self._ready.head(self._ready.norm(x_NH))

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
        if len(q) == 1:
            return self._scores(_twice(q), _twice(keys))[:1]
        return torch.cat([torch.bmm(q, block) for block in keys.split(FIXED_COLUMNS, 2)], 2)

    def _weigh(self, start: torch.Tensor | None, probs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Batched probs [., M, T] times values [., T, D], added to `start` in place."""
        if not self._fixed_columns:
            return torch.bmm(probs, values) if start is None else start.baddbmm_(probs, values)
        if len(probs) == 1:
            return self._weigh(None if start is None else _twice(start), _twice(probs), _twice(values))[:1]
        for part, block in zip(probs.split(FIXED_COLUMNS, 2), values.split(FIXED_COLUMNS, 1), strict=True):
            start = torch.bmm(part, block) if start is None else start.baddbmm_(part, block)
        assert start is not None, "no columns"
        return start


def _twice(x: torch.Tensor) -> torch.Tensor:
    """A batch of one as two: the kernel for a single product is another one."""
    return x.expand(2, -1, -1).contiguous()
