"""Ragged groups of samples to one packed row of tokens, with each prompt once, and back. Pure index arithmetic.

A pack holds, group after group, the prompt and then its responses. The last token of a response is left out: nothing
attends to it and nothing is predicted from it. The first token of a response is predicted from the prompt's last.
Letters: T packed tokens, N samples of the batch, M predicted tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from tranship.train.attention_blocks import AttentionIndex, PromptSpan, ResponseSpan, attention_index


@dataclass(frozen=True)
class Share:
    """A prompt and some of its samples, as indices into the batch; they are computed together."""

    prompt: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Pack:
    """One microbatch on the device.

    rows: the batch's row of each packed sample. token_ids, position_ids: int64 [1, T]. source: int64 [M], the packed
    token that predicts; target: int64 [M], the token it predicts; slot: int64 [M], its place in a flat
    [len(rows), max_response] array.
    """

    rows: tuple[int, ...]
    token_ids: torch.Tensor
    position_ids: torch.Tensor
    attention: AttentionIndex
    source: torch.Tensor
    target: torch.Tensor
    slot: torch.Tensor
    max_response: int


def rows_by_prompt(num_prompts: int, group_of: np.ndarray) -> list[Share]:
    """One Share per prompt that has samples, in the order of the prompts; rows in the order of the batch."""
    order = np.argsort(group_of, kind="stable")
    bounds = np.searchsorted(group_of[order], np.arange(num_prompts + 1))
    shares = (Share(prompt, tuple(order[start:stop].tolist())) for prompt, (start, stop) in enumerate(pairwise(bounds)))
    return [share for share in shares if share.rows]


def split_evenly(shares: Sequence[Share], parts: int) -> list[list[Share]]:
    """The shares in order, in at most `parts` runs whose sizes differ by one at most; no run is empty."""
    bounds = [len(shares) * part // parts for part in range(parts + 1)]
    runs = [list(shares[start:stop]) for start, stop in pairwise(bounds)]
    return [run for run in runs if run]


def split_by_tokens(
    shares: Iterable[Share],
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    max_tokens: int,
    *,
    whole: bool = False,
) -> list[list[Share]]:
    """The shares in order, in runs of at most max_tokens packed tokens.

    A share that alone is larger is split over its samples, and each part repeats the prompt; one sample that is
    larger still goes alone. whole: a share is never split, and a larger one goes alone.
    """
    runs: list[list[Share]] = []
    used = max_tokens
    for share in shares:
        limit = sys.maxsize if whole else max_tokens
        for part, size in _parts(share, prompt_lengths[share.prompt], response_lengths, limit):
            if used + size > max_tokens:
                runs.append([])
                used = 0
            runs[-1].append(part)
            used += size
    return runs


def _parts(
    share: Share, prompt_length: int, response_lengths: Sequence[int], max_tokens: int
) -> list[tuple[Share, int]]:
    parts: list[tuple[Share, int]] = []
    rows: list[int] = []
    size = prompt_length
    for row in share.rows:
        fed = max(0, response_lengths[row] - 1)
        if rows and size + fed > max_tokens:
            parts.append((Share(share.prompt, tuple(rows)), size))
            rows, size = [], prompt_length
        rows.append(row)
        size += fed
    parts.append((Share(share.prompt, tuple(rows)), size))
    return parts


def pack(
    shares: Sequence[Share],
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    *,
    wanted: Sequence[np.ndarray] | None,
    device: torch.device,
) -> Pack:
    """The shares as one packed row. wanted: bool [T_n] per batch row, the tokens to predict (None: all)."""
    rows = tuple(row for share in shares for row in share.rows)
    max_response = max(len(responses[row]) for row in rows)
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    sources: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    slots: list[np.ndarray] = []
    prompt_spans: list[PromptSpan] = []
    response_spans: list[ResponseSpan] = []
    place = 0
    for share in shares:
        prompt = prompts[share.prompt]
        assert len(prompt), "a prompt needs a token to predict the first response token from"
        span = PromptSpan(place, len(prompt))
        tokens.append(prompt)
        positions.append(np.arange(len(prompt)))
        prompt_spans.append(span)
        place += len(prompt)
        for row in share.rows:
            response = responses[row]
            fed = max(0, len(response) - 1)
            steps = np.arange(len(response))
            kept = steps if wanted is None else steps[wanted[row]]
            tokens.append(response[:fed])
            positions.append(len(prompt) + np.arange(fed))
            sources.append(np.where(kept == 0, span.start + span.length - 1, place + kept - 1))
            targets.append(response[kept])
            slots.append(len(response_spans) * max_response + kept)
            response_spans.append(ResponseSpan(span, place, fed))
            place += fed

    def to_device(parts: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)

    return Pack(
        rows=rows,
        token_ids=to_device(tokens)[None],
        position_ids=to_device(positions)[None],
        attention=attention_index(prompt_spans, response_spans, place, device),
        source=to_device(sources),
        target=to_device(targets),
        slot=to_device(slots),
        max_response=max_response,
    )


def padded(packed: Pack, columns: Sequence[np.ndarray], dtype: type) -> torch.Tensor:
    """[B, T] on the pack's device: the columns of its rows as numpy dtype, with zeros after their ends."""
    result = np.zeros((len(packed.rows), packed.max_response), dtype=dtype)
    for place, row in enumerate(packed.rows):
        result[place, : len(columns[row])] = columns[row]
    return torch.from_numpy(result).to(packed.slot.device)


def spread(packed: Pack, flat: torch.Tensor) -> torch.Tensor:
    """[B, T]: flat [M], in the order of the targets, at their places and zeros elsewhere; differentiable."""
    shape = (len(packed.rows), packed.max_response)
    return flat.new_zeros(shape[0] * shape[1]).index_copy(0, packed.slot, flat).view(shape)
