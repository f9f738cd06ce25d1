"""Ragged groups of samples to one packed row of tokens, with each prompt once, and back. Pure index arithmetic.

A pack holds, group after group, the prompt and then its responses. The last token of a response is left out: nothing
attends to it and nothing is predicted from it. The first token of a response is predicted from the prompt's last.
Letters: T packed tokens, G prompts of P padded tokens, N samples of R padded fed tokens (a response less its last),
M predicted tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch


@dataclass(frozen=True)
class Share:
    """A prompt and some of its samples, as indices into the batch; they are computed together."""

    prompt: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class AttentionIndex:
    """How packed tokens lie in the padded prompts [G, P] and fed responses [N, R] that attention works on.

    gather: int64 [G*P + N*R], the packed token of each padded place (0 where padding). inverse: int64 [T], the padded
    place of each packed token. group_of: int64 [N]. prompt_bias: float32 [1, 1, P, P], response_bias: float32
    [N, 1, R, P + R], 0 where a prompt token sees its prompt, and a fed response token its prompt and its own response;
    -inf elsewhere. longest_row: tokens of the longest prompt + response.
    """

    num_prompts: int
    prompt_width: int
    num_samples: int
    response_width: int
    gather: torch.Tensor
    inverse: torch.Tensor
    group_of: torch.Tensor
    prompt_bias: torch.Tensor
    response_bias: torch.Tensor
    longest_row: int


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
    shares: Iterable[Share], prompt_lengths: Sequence[int], response_lengths: Sequence[int], max_tokens: int
) -> list[list[Share]]:
    """The shares in order, in runs of at most max_tokens packed tokens.

    A share that alone is larger is split over its samples, and each part repeats the prompt; one sample that is
    larger still goes alone.
    """
    runs: list[list[Share]] = []
    used = max_tokens
    for share in shares:
        for part, size in _parts(share, prompt_lengths[share.prompt], response_lengths, max_tokens):
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
    prompt_width = max(len(prompts[share.prompt]) for share in shares)
    response_width = max(0, max_response - 1)
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    inverse: list[np.ndarray] = []
    sources: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    slots: list[np.ndarray] = []
    place = 0
    sample = 0
    first_response_place = len(shares) * prompt_width
    for group, share in enumerate(shares):
        prompt = prompts[share.prompt]
        assert len(prompt), "a prompt needs a token to predict the first response token from"
        tokens.append(prompt)
        positions.append(np.arange(len(prompt)))
        inverse.append(group * prompt_width + np.arange(len(prompt)))
        last_of_prompt = place + len(prompt) - 1
        place += len(prompt)
        for row in share.rows:
            response = responses[row]
            fed = max(0, len(response) - 1)
            steps = np.arange(len(response))
            kept = steps if wanted is None else steps[wanted[row]]
            tokens.append(response[:fed])
            positions.append(len(prompt) + np.arange(fed))
            inverse.append(first_response_place + sample * response_width + np.arange(fed))
            sources.append(np.where(kept == 0, last_of_prompt, place + kept - 1))
            targets.append(response[kept])
            slots.append(sample * max_response + kept)
            place += fed
            sample += 1

    def to_device(parts: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64)).to(device)

    return Pack(
        rows=rows,
        token_ids=to_device(tokens)[None],
        position_ids=to_device(positions)[None],
        attention=_attention_index(shares, prompts, responses, prompt_width, response_width, to_device(inverse)),
        source=to_device(sources),
        target=to_device(targets),
        slot=to_device(slots),
        max_response=max_response,
    )


def _attention_index(
    shares: Sequence[Share],
    prompts: Sequence[np.ndarray],
    responses: Sequence[np.ndarray],
    prompt_width: int,
    response_width: int,
    inverse: torch.Tensor,
) -> AttentionIndex:
    device = inverse.device
    num_samples = sum(len(share.rows) for share in shares)
    gather = torch.zeros(len(shares) * prompt_width + num_samples * response_width, dtype=torch.int64, device=device)
    gather[inverse] = torch.arange(len(inverse), device=device)
    group_of = np.repeat(np.arange(len(shares)), [len(share.rows) for share in shares])
    prompt_lengths = torch.tensor([len(prompts[share.prompt]) for share in shares], device=device)
    group_of_device = torch.from_numpy(group_of).to(device)
    sees_prompt = torch.arange(prompt_width, device=device)[None, :] < prompt_lengths[group_of_device, None]
    sees_own = torch.ones(response_width, response_width, dtype=torch.bool, device=device).tril()
    # A padded query sees real tokens too: a row of the mask without any would make softmax divide 0 by 0.
    response_mask = torch.cat(
        [
            sees_prompt[:, None, :].expand(num_samples, response_width, prompt_width),
            sees_own[None].expand(num_samples, response_width, response_width),
        ],
        dim=-1,
    )
    longest_row = max(len(prompts[share.prompt]) + max(len(responses[row]) for row in share.rows) for share in shares)
    return AttentionIndex(
        num_prompts=len(shares),
        prompt_width=prompt_width,
        num_samples=num_samples,
        response_width=response_width,
        gather=gather,
        inverse=inverse,
        group_of=group_of_device,
        prompt_bias=_bias(torch.ones(prompt_width, prompt_width, dtype=torch.bool, device=device).tril()[None, None]),
        response_bias=_bias(response_mask[:, None]),
        longest_row=longest_row,
    )


def _bias(sees: torch.Tensor) -> torch.Tensor:
    return torch.zeros(sees.shape, device=sees.device).masked_fill_(~sees, -torch.inf)
