"""The forward pass of a decoder: packed whole sequences (prefill, probe), or one token of each slot (decode).

Letters: N tokens (packed) or rows (decode), H hidden, Q query heads, G key heads, D head_dim of the cache, S kept
vectors of a token (keys and values of all key heads, or one latent), T columns, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from tranship.rollout.native.attention import Attention, make_attention
from tranship.rollout.native.cache import KvTable
from tranship.rollout.native.decode_attention import CompiledAttention, DecodeAttention, DecodeRows, PlainAttention
from tranship.rollout.native.kernels import Kernels
from tranship.rollout.native.linear import Linear, make_linear
from tranship.rollout.native.mlp import FeedForward, make_feed_forward
from tranship.rollout.native.norm import RmsNorm
from tranship.rollout.native.ranks import Ranks
from tranship.rollout.native.recorded import Record, RecordedDecode
from tranship.rollout.native.shape import ModelShape
from tranship.rollout.native.step import CompiledStep, compiled_step
from tranship.rollout.native.summed import WholeLogits
from tranship.rollout.native.weights import Weights


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence: int32 [L], from position `start` on.

    past: for each layer the keys and values [sides, G, start, D] of what came before; None where start is 0.
    """

    token_ids: np.ndarray
    start: int = 0
    past: Sequence[torch.Tensor] | None = None


@dataclass(frozen=True)
class Prepared:
    """All weights, ready for their kernels. step: a decode step in one call, where there is one."""

    embed: torch.Tensor
    layers: tuple[tuple[Attention, FeedForward], ...]
    norm: RmsNorm
    head: Linear | WholeLogits
    step: CompiledStep | None


class Model:
    """Prepared weights and the passes over them. `prepare` must follow every change of the weights.

    fixed_columns: attention reads keys and values in blocks of `FIXED_COLUMNS`. kernels: compute what lies between
    the products; None: torch does. shape: of what lies here; ranks: those that have the rest, and run the same passes.
    record: of decode steps of up to `max_rows` rows, without kernels; None: the device is told anew at every step.
    """

    def __init__(
        self,
        shape: ModelShape,
        device: torch.device,
        dtype: torch.dtype,
        max_tokens: int,
        *,
        fixed_columns: bool,
        kernels: Kernels | None,
        ranks: Ranks | None = None,
        record: Record | None = None,
        max_rows: int = 0,
    ) -> None:
        assert record is None or kernels is None, "kernels of the CPU cannot be recorded"
        self._shape = shape
        self._device = device
        self._ranks = ranks
        self._recorded = (
            None
            if record is None
            else RecordedDecode(self._decode, record, device, max_rows=max_rows, vocab=shape.vocab)
        )
        self._fixed_columns = fixed_columns
        self._kernels = kernels
        self._decode_attention: DecodeAttention = (
            PlainAttention(shape, device, dtype, fixed_columns)
            if kernels is None
            else CompiledAttention(shape, kernels)
        )
        angles = torch.arange(max_tokens + 1, dtype=torch.float32)[:, None] * shape.rope_frequencies
        turns = torch.polar(torch.full_like(angles, shape.rope_scale), angles)
        self._turns = turns.to(device)[:, None]
        self._scale = shape.attention_scale
        self._prepared: Prepared | None = None

    def free(self) -> None:
        """Drop the prepared weights."""
        self._prepared = None
        if self._recorded is not None:
            self._recorded.clear()

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
        layers = tuple(self._prepare_layer(weights, index) for index in range(shape.num_layers))
        norm = RmsNorm(weights["norm"], shape.norm_eps, self._device, self._kernels)
        head = self._prepare_head(weights)
        step = compiled_step(shape, self._kernels, layers, norm, head)
        self._prepared = Prepared(weights["embed"], layers, norm, head, step)

    def _prepare_head(self, weights: Weights) -> Linear | WholeLogits:
        weight_VH = weights["embed" if self._shape.tied else "lm_head"]
        if self._ranks is None:
            return make_linear(weight_VH, None, self._kernels)
        if self._shape.tied:
            weight_VH = weight_VH[slice(*self._ranks.share.stretch(self._shape.vocab))]
        return WholeLogits(make_linear(weight_VH, None, self._kernels), self._ranks, self._shape.vocab)

    def _prepare_layer(self, weights: Weights, index: int) -> tuple[Attention, FeedForward]:
        own = f"layers.{index}"
        shape, kernels, ranks = self._shape, self._kernels, self._ranks
        attention = make_attention(shape, weights, own, fixed=self._fixed_columns, kernels=kernels, ranks=ranks)
        return attention, make_feed_forward(shape, weights, index, kernels, ranks)

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """float32 [N, V] of final hidden states."""
        return self._ready.head.wide(hidden_NH)

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
        """Run one token of each of rows 0..N-1 of `responses` and keep its keys and values; returns the logits,
        float32 [N, V].

        The tables must have room for it.
        """
        return (self._recorded or self._decode)(rows, prompts, responses)

    def _decode(self, rows: DecodeRows, prompts: KvTable, responses: KvTable) -> torch.Tensor:
        turns_N = self._turns.index_select(0, rows.prompt_length_N + rows.column_N)
        x_NH = functional.embedding(rows.token_N, self._ready.embed)
        if self._ready.step is not None:
            return self._ready.step(x_NH, rows, turns_N, prompts, responses)
        attend = self._decode_attention
        attend.start(rows, turns_N, prompts, responses)
        for index, (attention, feed_forward) in enumerate(self._ready.layers):
            x_NH = feed_forward(attention.finish(x_NH, attend(index, attention, x_NH)))
        attend.end()
        return self._ready.head.wide(self._ready.norm(x_NH))
