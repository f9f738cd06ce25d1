"""Attention of one new token per running row, over its prompt and its response: with torch, or by compiled kernels.

Letters: N rows, H hidden, Q query heads, G key heads, R = Q / G, D head_dim of the cache, T columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from tranship.rollout.native.attention import Attention
from tranship.rollout.native.cache import KvTable
from tranship.rollout.native.kernels import AttendArguments, Kernels
from tranship.rollout.native.shape import ModelShape

FIXED_COLUMNS = 128
"""In deterministic mode attention reads keys and values in blocks of this width, so that no product's shape depends
on how long the neighbours are."""


@dataclass(frozen=True)
class Sharing:
    """Which rows share a prompt: int64 tensors.

    num_prompts: prompts that are read. to_prompt [num_prompts x G x W]: for each prompt, key head and place (W: the
    most rows that share a prompt) the row and key head (row x G + head) that stands there, any one where none does.
    to_row [N x G]: the inverse. order [N]: the rows, prompt by prompt. units [., 3]: prompt, first place in order and
    number of rows of what is computed together.
    """

    num_prompts: int
    to_prompt: torch.Tensor
    to_row: torch.Tensor
    order: torch.Tensor
    units: torch.Tensor


@dataclass(frozen=True)
class DecodeRows:
    """What one decode step runs: int64 tensors.

    token_N: the tokens. column_N: where each lies in its response. prompt_length_N. sharing: of the same rows.
    """

    token_N: torch.Tensor
    column_N: torch.Tensor
    prompt_length_N: torch.Tensor
    sharing: Sharing


class DecodeAttention(Protocol):
    """The attention of the layers of one decode step."""

    def start(self, rows: DecodeRows, turns_N: torch.Tensor, prompts: KvTable, responses: KvTable) -> None:
        """Begin a step. turns_N: complex [N, 1, turned pairs], of each row's position."""
        ...

    def __call__(self, index: int, attention: Attention, x_NH: torch.Tensor) -> torch.Tensor:
        """What the queries of layer `index` attend to [N, Q D]; keeps the new keys and values."""
        ...

    def end(self) -> None:
        """The step is over: hold nothing of the cache, which may be dropped or laid out anew."""
        ...


class PlainAttention:
    """With torch. A prompt is read once for all rows that share it: their queries are gathered below each other."""

    def __init__(self, shape: ModelShape, device: torch.device, dtype: torch.dtype, fixed_columns: bool) -> None:
        self._shape = shape
        self._device = device
        self._dtype = dtype
        self._fixed_columns = fixed_columns

    def start(self, rows: DecodeRows, turns_N: torch.Tensor, prompts: KvTable, responses: KvTable) -> None:
        self._sharing, self._responses = rows.sharing, responses
        self._turns_N, self._scaled_N = turns_N, turns_N * self._shape.attention_scale
        self._index = responses.append_index(rows.column_N)
        self._mask_N1T = self._mask(rows, prompts.columns, responses.columns)
        self._shared, self._own = prompts.read(rows.sharing.num_prompts), responses.read(len(rows.token_N))

    def __call__(self, index: int, attention: Attention, x_NH: torch.Tensor) -> torch.Tensor:
        q_NQD, kv_NSD = attention.project(x_NH, self._scaled_N, self._turns_N)
        self._responses.flat(index).index_put_((self._index,), kv_NSD)
        return self._attend(q_NQD, self._shared[index], self._own[index])

    def end(self) -> None:
        del self._sharing, self._responses, self._turns_N, self._scaled_N
        del self._index, self._mask_N1T, self._shared, self._own

    def _mask(self, rows: DecodeRows, prompt_columns: int, response_columns: int) -> torch.Tensor:
        """[N, 1, P + T]: 0 for the row's own prompt and its response up to now, else -inf."""
        beyond = torch.arange(prompt_columns, device=self._device) >= rows.prompt_length_N[:, None]
        later = torch.arange(response_columns, device=self._device) > rows.column_N[:, None]
        hidden = torch.cat([beyond, later], 1)
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, float("-inf"))[:, None]

    def _attend(
        self,
        q_NQD: torch.Tensor,
        prompts: tuple[torch.Tensor, torch.Tensor],
        responses: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """[N, Q D]. prompts: keys [num_prompts G, D, P] and values [num_prompts G, P, D]; responses: [N G, D, T] and
        [N G, T, D]."""
        sharing, mask_N1T = self._sharing, self._mask_N1T
        count, repeat, dim = q_NQD.shape[0], self._shape.heads_per_kv, self._shape.head_dim
        blocks, _, columns = prompts[0].shape
        q = q_NQD.reshape(-1, repeat * dim)
        q_shared = q.index_select(0, sharing.to_prompt).view(blocks, -1, dim)
        shared = self._scores(q_shared, prompts[0]).view(-1, repeat * columns)
        shared = shared.index_select(0, sharing.to_row).view(-1, repeat, columns)
        scores = torch.cat([shared, self._scores(q.view(-1, repeat, dim), responses[0])], -1)
        scores.view(count, -1, mask_N1T.shape[-1]).add_(mask_N1T)
        probs = torch.softmax(scores, -1)
        weights = probs[..., :columns].index_select(0, sharing.to_prompt).view(blocks, -1, columns)
        out = self._weigh(None, weights, prompts[1]).view(-1, repeat * dim)
        out = out.index_select(0, sharing.to_row).view(-1, repeat, dim)
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


class CompiledAttention:
    """By the compiled kernels, which also turn queries and keys and keep the new ones: one call for a layer."""

    def __init__(self, shape: ModelShape, kernels: Kernels) -> None:
        self._shape = shape
        self._kernels = kernels

    def start(self, rows: DecodeRows, turns_N: torch.Tensor, prompts: KvTable, responses: KvTable) -> None:
        self._turns_N = turns_N
        self._factors = torch.view_as_real(turns_N).flatten(1).contiguous()
        self._held = (rows, prompts.storages, responses.storages)
        self._arguments = attend_arguments(self._shape, rows, prompts, responses)

    def __call__(self, index: int, attention: Attention, x_NH: torch.Tensor) -> torch.Tensor:
        shape, arguments = self._shape, self._arguments
        q_NQD, kv_NSD, turned = attention.parts(x_NH, self._turns_N)
        out = torch.empty(len(x_NH), shape.num_heads * shape.head_dim, dtype=x_NH.dtype)
        arguments.q, arguments.q_stride = q_NQD.data_ptr(), q_NQD.stride(0)
        arguments.keys_in, arguments.kv_stride = kv_NSD.data_ptr(), kv_NSD.stride(0)
        arguments.values_in = kv_NSD[:, -shape.num_kv_heads :].data_ptr()
        arguments.turns = None if turned else self._factors.data_ptr()
        if turned:
            arguments.scale = 1.0
        arguments.wide = x_NH.dtype == torch.float32
        _, prompts, responses = self._held
        arguments.keys, arguments.values = responses[index]
        arguments.prompt_keys, arguments.prompt_values = prompts[index]
        arguments.out = out.data_ptr()
        self._kernels.attend(arguments)
        return out

    def end(self) -> None:
        del self._turns_N, self._factors, self._held, self._arguments


def attend_arguments(shape: ModelShape, rows: DecodeRows, prompts: KvTable, responses: KvTable) -> AttendArguments:
    """What all layers of a step have in common; the tensors must outlive it."""
    sharing = rows.sharing
    return AttendArguments(
        scale=shape.attention_scale,
        room=responses.room,
        prompt_room=prompts.room,
        columns=rows.column_N.data_ptr(),
        prompt_lengths=rows.prompt_length_N.data_ptr(),
        order=sharing.order.data_ptr(),
        units=sharing.units.data_ptr(),
        num_units=len(sharing.units),
        heads=shape.num_kv_heads,
        repeat=shape.heads_per_kv,
        dim=shape.head_dim,
    )


def _twice(x: torch.Tensor) -> torch.Tensor:
    """A batch of one as two, laid out alike: the kernel for a single product is another one, and so is that for keys
    that lie the other way round."""
    _, rows, columns = x.shape
    _, row, column = x.stride()
    span = 1 + (rows - 1) * row + (columns - 1) * column
    return x.new_empty(2 * span).as_strided((2, rows, columns), (span, row, column)).copy_(x)
