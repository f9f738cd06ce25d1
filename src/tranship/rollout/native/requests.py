"""Requests as the native engine keeps them: checked at submission, and grouped by prompt."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from tranship.rollout.engine import GroupRequest
from tranship.rollout.native.cache import PromptRow
from tranship.types import FinishReason, Response, SampleId, Sampling, TopLogprobs, UserError


@dataclass
class PromptState:
    """What a prefill left for a group: its row in the table of prompts, and the logits [V] after it."""

    row: PromptRow
    logits: torch.Tensor


@dataclass(frozen=True)
class Sample:
    """One sample that waits for a slot. tokens, logprobs, versions, top: of an earlier, interrupted try (may be
    empty)."""

    sample: SampleId
    seed: int
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    top: TopLogprobs | None = None

    def response(self, reason: FinishReason) -> Response:
        """The sample as it stands."""
        return Response(self.sample, self.tokens, self.logprobs, self.versions, reason, self.top)


@dataclass(eq=False)
class Group:
    """One request: the samples of one prompt that wait. goes_on: what is computed of them is kept for another request.
    prompt: its prefill, while samples need it to start."""

    prompt_ids: np.ndarray
    sampling: Sampling
    end_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    goes_on: bool = False
    waiting: deque[Sample] = field(default_factory=deque)
    prompt: PromptState | None = None


def make_group(
    request: GroupRequest, *, vocab: int, max_tokens: int, end_ids: tuple[int, ...], stop_strings: tuple[str, ...] = ()
) -> tuple[Group, list[Response]]:
    """The request's group, and the responses of partials that had ended already.

    end_ids, stop_strings: what ends a response. Raises UserError for what cannot run, before anything is queued.
    """
    prompt_ids = np.ascontiguousarray(request.prompt_ids, dtype=np.int32)
    _check_prompt(prompt_ids, request, vocab, max_tokens)
    _check_sampling(request, vocab)
    if len(request.seeds) != len(request.samples) or len(set(request.samples)) != len(request.samples):
        raise UserError(
            f"a request of {len(request.samples)} samples ({len(set(request.samples))} different) came with "
            f"{len(request.seeds)} seeds: give each sample once, with one seed"
        )
    group = Group(prompt_ids, request.sampling, end_ids, stop_strings, request.goes_on)
    ended = []
    for name, seed in zip(request.samples, request.seeds, strict=True):
        sample = _make_sample(name, seed, (request.partials or {}).get(name), vocab, request.sampling.top_logprobs)
        reason = _ended(sample.tokens, request.sampling.max_response_tokens, end_ids)
        if reason is None:
            group.waiting.append(sample)
        else:
            ended.append(sample.response(reason))
    return group, ended


def _check_prompt(prompt_ids: np.ndarray, request: GroupRequest, vocab: int, max_tokens: int) -> None:
    if prompt_ids.ndim != 1 or not len(prompt_ids):
        raise UserError(f"a prompt of shape {list(prompt_ids.shape)} cannot be continued: give at least one token id")
    _check_ids(prompt_ids, vocab, "a prompt")
    longest = len(prompt_ids) + request.sampling.max_response_tokens
    if longest > max_tokens:
        raise UserError(
            f"a prompt of {len(prompt_ids)} tokens and max_response_tokens={request.sampling.max_response_tokens} "
            f"make {longest} tokens, but the engine holds {max_tokens}: shorten one of them, or make the engine larger"
        )


def _check_ids(ids: np.ndarray, vocab: int, what: str) -> None:
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab):
        worst = int(ids.min() if ids.min() < 0 else ids.max())
        raise UserError(f"{what} has token id {worst}, but the model knows 0 to {vocab - 1}: check the tokenizer")


def _check_sampling(request: GroupRequest, vocab: int) -> None:
    sampling = request.sampling
    for name, value, good in (
        ("max_response_tokens", sampling.max_response_tokens, sampling.max_response_tokens >= 1),
        ("temperature", sampling.temperature, 0 <= sampling.temperature < float("inf")),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1),
        ("top_k", sampling.top_k, sampling.top_k >= 0),
        ("min_p", sampling.min_p, 0 <= sampling.min_p < 1),
        ("top_logprobs", sampling.top_logprobs, 0 <= sampling.top_logprobs <= vocab),
    ):
        if not good:
            raise UserError(
                f"sampling.{name}={value} is out of range: max_response_tokens >= 1, temperature >= 0, "
                f"0 < top_p <= 1, top_k >= 0, 0 <= min_p < 1, 0 <= top_logprobs <= {vocab}"
            )
    if not all(sampling.stop_strings):
        raise UserError("sampling.stop_strings has an empty string, which would end every response: leave it out")


def _make_sample(name: SampleId, seed: int, partial: Response | None, vocab: int, num_top: int) -> Sample:
    if partial is None:
        return Sample(name, seed, np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32))
    _check_ids(partial.token_ids, vocab, f"the partial response of {name}")
    found = 0 if partial.top is None else partial.top.token_ids.shape[1]
    if found != num_top:
        raise UserError(
            f"the partial response of {name} has {found} likeliest tokens at each place, and sampling.top_logprobs is "
            f"{num_top}: ask for as many as before"
        )
    return Sample(
        name,
        seed,
        np.array(partial.token_ids, np.int32),
        np.array(partial.logprobs, np.float32),
        np.array(partial.policy_versions, np.int32),
        partial.top,
    )


def _ended(tokens: np.ndarray, cap: int, end_ids: tuple[int, ...]) -> FinishReason | None:
    if len(tokens) and int(tokens[-1]) in end_ids:
        return "stop"
    return "length" if len(tokens) >= cap else None
