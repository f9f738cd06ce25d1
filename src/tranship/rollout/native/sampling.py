"""Drawing tokens: seeds to uniforms, logits to tokens and log-probs. Every row is computed by itself.

Letters: N rows, V vocabulary, K kept candidates, C blocks of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tranship.rollout.native.kernels import Kernels
from tranship.types import TopLogprobs

BLOCK = 256
ROW_BUDGET = 1 << 20
"""Logits handled at a time: few enough to stay in a processor's cache between the passes over them."""


@dataclass(frozen=True)
class RowSampling:
    """How each of N rows is drawn: seed uint64, position int64 (the token's index in its response), temperature,
    top_p and min_p float64, top_k int64 (0: all)."""

    seed: np.ndarray
    position: np.ndarray
    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray

    def rows(self, index: slice | np.ndarray) -> RowSampling:
        """The same for some of the rows."""
        return RowSampling(
            self.seed[index],
            self.position[index],
            self.temperature[index],
            self.top_k[index],
            self.top_p[index],
            self.min_p[index],
        )


def uniforms(seed: np.ndarray, position: np.ndarray) -> np.ndarray:
    """float64 [N] in [0, 1): a hash of (seed, position) alone.

    The finaliser of SplitMix64 (Steele, Lea, Flood 2014), once for the seed and once for the counter.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        counter = _mix(seed.astype(np.uint64)) + golden * (position.astype(np.uint64) + np.uint64(1))
        return (_mix(counter) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draw(logits_NV: torch.Tensor, how: RowSampling, kernels: Kernels | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Tokens int64 [N] and their log-probs float32 [N] under softmax(logits / temperature), before any cut.

    Temperature 0 takes the likeliest token and reports temperature 1. Cuts apply in the order top-k, top-p (of what
    top-k left), min-p (times the likeliest). A row that is not finite gives the log-prob nan. kernels: draw rows
    without cuts; None: torch does.
    """
    if kernels is not None and not _is_cut(how).any():
        return kernels.draw(logits_NV, how.temperature, uniforms(how.seed, how.position))
    count, vocab = logits_NV.shape
    step = max(1, ROW_BUDGET // vocab)
    tokens, logprobs = np.empty(count, np.int64), np.empty(count, np.float32)
    for start in range(0, count, step):
        rows = slice(start, start + step)
        tokens[rows], logprobs[rows] = _draw_rows(logits_NV[rows], how.rows(rows))
    return tokens, logprobs


def likeliest(logits_V: torch.Tensor, temperature: float, count: int) -> TopLogprobs:
    """Of one row, [1, count]: the tokens that are likeliest under softmax(logits / temperature), as `draw` has it."""
    logprobs_V = torch.log_softmax(logits_V.float() / (temperature or 1.0), -1)
    logprobs_K, token_K = logprobs_V.topk(count)
    return TopLogprobs(token_K.cpu().numpy().astype(np.int32)[None], logprobs_K.cpu().numpy()[None])


def join_likeliest(parts: Sequence[TopLogprobs], count: int) -> TopLogprobs | None:
    """The places of all parts, one after the other; None where count is 0."""
    if not count:
        return None
    ids = [np.empty((0, count), np.int32), *(part.token_ids for part in parts)]
    return TopLogprobs(np.concatenate(ids), np.concatenate([ids[0].astype(np.float32), *(p.logprobs for p in parts)]))


def _is_cut(how: RowSampling) -> np.ndarray:
    """bool [N]: whether some tokens are left out."""
    return (how.temperature > 0) & ((how.top_k > 0) | (how.top_p < 1) | (how.min_p > 0))


def _draw_rows(logits_NV: torch.Tensor, how: RowSampling) -> tuple[np.ndarray, np.ndarray]:
    device = logits_NV.device
    greedy = how.temperature == 0
    logits_NV = logits_NV.float()
    if not np.all(greedy | (how.temperature == 1)):
        divisor = torch.from_numpy(np.where(greedy, 1.0, how.temperature)).to(device, torch.float32)
        logits_NV = logits_NV / divisor[:, None]
    probs_NV = torch.softmax(logits_NV, -1)
    uniform_N = torch.from_numpy(uniforms(how.seed, how.position)).to(device)
    cut = _is_cut(how)
    plain = ~greedy & ~cut
    if plain.all():
        tokens_N = _inverse_cdf(probs_NV, uniform_N)
    else:
        tokens_N = torch.empty(len(greedy), dtype=torch.int64, device=device)
        for kind in (greedy, cut, plain):
            index = torch.from_numpy(np.flatnonzero(kind)).to(device)
            if not len(index):
                continue
            if kind is greedy:
                tokens_N[index] = logits_NV[index].argmax(-1)
            elif kind is cut:
                tokens_N[index] = _inverse_cdf_cut(probs_NV[index], uniform_N[index], how.rows(kind))
            else:
                tokens_N[index] = _inverse_cdf(probs_NV[index], uniform_N[index])
    logprobs_N = probs_NV.gather(1, tokens_N[:, None]).squeeze(1).log()
    return tokens_N.cpu().numpy(), logprobs_N.cpu().numpy()


def _inverse_cdf(probs_NV: torch.Tensor, uniform_N: torch.Tensor) -> torch.Tensor:
    """int64 [N]: the first token at which the running sum passes uniform x total; found by blocks, then within one."""
    vocab = probs_NV.shape[1]
    whole = vocab // BLOCK * BLOCK
    sums_NC = probs_NV[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1)
    if whole < vocab:
        sums_NC = torch.cat([sums_NC, probs_NV[:, whole:].sum(-1, keepdim=True)], 1)
    ends_NC = sums_NC.double().cumsum(1)
    target_N1 = (uniform_N * ends_NC[:, -1])[:, None]
    block_N1 = _first_above(ends_NC, target_N1)
    before_N1 = (ends_NC.gather(1, block_N1) - sums_NC.gather(1, block_N1).double()).clamp_(min=0)
    column_NB = block_N1 * BLOCK + torch.arange(BLOCK, device=probs_NV.device)
    inside_NB = probs_NV.gather(1, column_NB.clamp(max=vocab - 1)).double()
    inside_NB = torch.where(column_NB < vocab, inside_NB, 0.0).cumsum(1)
    token_N1 = block_N1 * BLOCK + _first_above(inside_NB, target_N1 - before_N1)
    return token_N1.clamp_(max=vocab - 1).squeeze(1)


def _first_above(rising: torch.Tensor, target_N1: torch.Tensor) -> torch.Tensor:
    """int64 [N, 1]: the first column above the target; the last column that rises where rounding left none."""
    below_last = torch.nextafter(rising[:, -1:], torch.zeros_like(target_N1))
    found = torch.searchsorted(rising, torch.minimum(target_N1, below_last), right=True)
    return found.clamp_(max=rising.shape[1] - 1)


def _inverse_cdf_cut(probs_NV: torch.Tensor, uniform_N: torch.Tensor, how: RowSampling) -> torch.Tensor:
    """int64 [N]: like `_inverse_cdf`, over the candidates that top-k, top-p and min-p leave, likeliest first."""
    device, vocab = probs_NV.device, probs_NV.shape[1]
    top_k = np.where(how.top_k > 0, np.minimum(how.top_k, vocab), vocab)
    if top_k.max() < vocab:
        sorted_NK, token_NK = probs_NV.topk(int(top_k.max()), -1)
    else:
        sorted_NK, token_NK = torch.sort(probs_NV, stable=True, dim=-1, descending=True)
    sorted_NK = sorted_NK.double()
    rank_K = torch.arange(sorted_NK.shape[1], device=device)
    kept_NK = rank_K < torch.from_numpy(top_k).to(device)[:, None]
    mass_NK = torch.where(kept_NK, sorted_NK, 0.0)
    before_NK = mass_NK.cumsum(1) - mass_NK
    enough_N1 = torch.from_numpy(how.top_p).to(device)[:, None] * mass_NK.sum(1, keepdim=True)
    floor_N1 = torch.from_numpy(how.min_p).to(device)[:, None] * sorted_NK[:, :1]
    kept_NK = kept_NK & (before_NK < enough_N1) & (sorted_NK >= floor_N1)
    kept_NK[:, 0] = True
    ends_NK = torch.where(kept_NK, sorted_NK, 0.0).cumsum(1)
    rank_N1 = _first_above(ends_NK, (uniform_N * ends_NK[:, -1])[:, None])
    return token_NK.gather(1, rank_N1).squeeze(1)
