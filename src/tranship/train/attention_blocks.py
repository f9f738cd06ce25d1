"""Which packed tokens attend to which, as padded blocks of rows of similar length. Index arithmetic, once per pack.

Letters: T packed tokens; a block has B rows of Q padded queries and S padded keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

# A row shorter than this part of its block's longest starts a new block; below MIN_WIDTH padding costs less than that.
MIN_FILL = 0.75
MIN_WIDTH = 16

T = TypeVar("T")


@dataclass(frozen=True)
class PromptSpan:
    """A prompt's tokens in the pack."""

    start: int
    length: int


@dataclass(frozen=True)
class ResponseSpan:
    """A response's fed tokens in the pack, and its prompt's."""

    prompt: PromptSpan
    start: int
    length: int


@dataclass(frozen=True)
class AttentionBlock:
    """Rows that attend together: prompts to themselves, or responses to their prompt and themselves.

    queries: int64 [B, Q] and keys: int64 [B, S], packed tokens (0 where padding); the last Q keys are the queries.
    bias: float32 [B or 1, 1, Q, S], 0 where a query sees a key, -inf elsewhere; each query sees at least one key.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True)
class AttentionIndex:
    """All attention of a pack: each packed token is a query of one block.

    inverse: int64 [T], its place among the queries of all blocks in order, flat. longest_row: tokens of the longest
    prompt + fed response.
    """

    blocks: tuple[AttentionBlock, ...]
    inverse: torch.Tensor
    num_places: int
    longest_row: int


def attention_index(
    prompts: Sequence[PromptSpan], responses: Sequence[ResponseSpan], num_tokens: int, device: torch.device
) -> AttentionIndex:
    """The blocks of a pack of num_tokens tokens, on the device. Spans of length 0 are in no block."""
    inverse = np.full(num_tokens, -1)
    blocks: list[AttentionBlock] = []
    num_places = 0

    def add(queries: np.ndarray, real: np.ndarray, keys: np.ndarray, sees: np.ndarray) -> None:
        nonlocal num_places
        inverse[queries[real]] = num_places + np.flatnonzero(real)
        num_places += queries.size
        bias = np.where(sees, np.float32(0), np.float32(-np.inf))[:, None]
        blocks.append(AttentionBlock(*(torch.from_numpy(x).to(device) for x in (queries, keys, bias))))

    for prompt_run in _runs(prompts, lambda span: span.length):
        queries, real = _places(prompt_run)
        add(queries, real, queries, _causal(queries.shape[1])[None])
    for response_run in _runs(responses, lambda span: span.length):
        queries, real = _places(response_run)
        prompt_keys, seen = _places([span.prompt for span in response_run])
        if (seen == seen[:1]).all():
            seen = seen[:1]
        shape = (len(seen), queries.shape[1])
        sees = np.concatenate(
            [
                np.broadcast_to(seen[:, None], (*shape, seen.shape[1])),
                np.broadcast_to(_causal(shape[1]), (*shape, shape[1])),
            ],
            axis=2,
        )
        add(queries, real, np.concatenate([prompt_keys, queries], axis=1), sees)
    assert (inverse >= 0).all(), "a packed token is in no block"
    rows = [span.length for span in prompts] + [span.prompt.length + span.length for span in responses]
    return AttentionIndex(tuple(blocks), torch.from_numpy(inverse).to(device), num_places, max(rows))


def _runs(spans: Sequence[T], length: Callable[[T], int]) -> list[list[T]]:
    """The spans of length above 0, longest first, cut where padding would waste too much."""
    runs: list[list[T]] = []
    widest = 0
    for span in sorted((span for span in spans if length(span)), key=length, reverse=True):
        if not runs or (widest > MIN_WIDTH and length(span) < MIN_FILL * widest):
            runs.append([])
            widest = length(span)
        runs[-1].append(span)
    return runs


def _places(spans: Sequence[PromptSpan | ResponseSpan]) -> tuple[np.ndarray, np.ndarray]:
    """(packed tokens int64 [B, widest], 0 where padding; bool [B, widest], where not)."""
    starts, lengths = (np.array([getattr(span, name) for span in spans])[:, None] for name in ("start", "length"))
    steps = np.arange(lengths.max())[None]
    real = steps < lengths
    return np.where(real, starts + steps, 0), real


def _causal(width: int) -> np.ndarray:
    return np.tri(width, dtype=bool)
