"""The words that every floor shares: identities, samples, batches, errors. Imports numpy and nothing of ours."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np


class UserError(ValueError):
    """Something that the user gave is wrong. The message names the value and what to do about it."""


class NotYet(UserError):
    """What was asked for cannot be done now, and may be soon: the same may be asked again."""


class RunError(RuntimeError):
    """A run cannot go on. The message names the cause: the stage, the process or the samples."""


FinishReason = Literal["stop", "length", "abort"]
RewardStatus = Literal["scored", "masked", "invalid"]


class SampleId(NamedTuple):
    """A sample's identity; it travels with the sample, and no code derives it from a position.

    group_id: the occurrence of a prompt in the stream (counts from 0; the same prompt in the next epoch is
    another group). sample_index: which of the group's samples (-1: the group itself, its prompt).
    attempt: counts deliberate resampling only; work that is redone after a fault keeps its number.
    """

    group_id: int
    sample_index: int
    attempt: int = 0


def sample_seed(run_seed: int, sample: SampleId) -> int:
    """The seed of one sample's random numbers: 63 bits that depend on (run, prompt, sample, attempt) alone."""
    text = f"{run_seed}/{sample.group_id}/{sample.sample_index}/{sample.attempt}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. The defaults are neutral: the model's own distribution.

    The log-probs that an engine reports are those of softmax(logits / temperature) before top-k, top-p and min-p
    cut it (temperature 0 is greedy, and reports log-probs at temperature 1).

    stop_token_ids: any of them ends a response, and is its last token. stop_strings: a response ends with the token
    that completes one of them in its text; nothing is cut off, so that what was sampled is what is trained. An engine
    that was not given a tokenizer refuses them.

    top_logprobs: how many of the likeliest tokens are reported at each place, with their log-probs.
    """

    max_response_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    top_logprobs: int = 0


@dataclass(frozen=True)
class Recorded:
    """A response that a data source brings. token_ids int32 [T]; mask bool [T], True where it is to be learned."""

    token_ids: np.ndarray
    mask: np.ndarray

    def __post_init__(self) -> None:
        assert len(self.token_ids) == len(self.mask), (len(self.token_ids), len(self.mask))


@dataclass(frozen=True)
class Prompt:
    """One prompt of a data source, tokenised.

    token_ids: int32 [P], with the chat template applied. text: a view of it for people. extra_info: the row's
    own dictionary (JSON values). ground_truth: whatever the reward needs (JSON value). recorded: responses that the
    row brings (a demonstration; chosen and rejected). messages: the conversation as the template got it (none for a
    plain prompt). tools: JSON schemas that the template was given.
    """

    index: int
    token_ids: np.ndarray
    text: str
    data_source: str
    ground_truth: Any = None
    ability: str = ""
    extra_info: dict[str, Any] = field(default_factory=dict)
    recorded: tuple[Recorded, ...] = ()
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class TopLogprobs:
    """The likeliest tokens at each place of a response, likeliest first: token_ids int32 [T, K]; logprobs float32
    [T, K], of the same distribution as those of the sampled tokens."""

    token_ids: np.ndarray
    logprobs: np.ndarray

    def __getitem__(self, places: slice) -> TopLogprobs:
        return TopLogprobs(self.token_ids[places], self.logprobs[places])


@dataclass
class Response:
    """What an engine made of one sample.

    token_ids int32 [T]; logprobs float32 [T], of the version that sampled each token; policy_versions int32 [T].
    An end-of-text token that was sampled is part of token_ids. finish_reason "length" means the cap was reached
    without one; "abort" means partial output. top: where `Sampling.top_logprobs` asked for it.
    """

    sample: SampleId
    token_ids: np.ndarray
    logprobs: np.ndarray
    policy_versions: np.ndarray
    finish_reason: FinishReason
    top: TopLogprobs | None = None

    def __post_init__(self) -> None:
        lengths = (len(self.token_ids), len(self.logprobs), len(self.policy_versions))
        assert len(set(lengths)) == 1, f"ids, logprobs and versions of {self.sample} differ in length: {lengths}"
        assert self.top is None or len(self.top.token_ids) == lengths[0], f"{self.sample} lacks likeliest tokens"


@dataclass(frozen=True)
class Score:
    """A sample's reward: scored (a finite value), masked (no gradient wanted), or invalid with a reason.

    An invalid sample has no gradient and enters no mean; it never becomes a reward of 0. raw: the value before any
    shaping (length, overlong); None: there was none, raw is value. Whether a group has a signal is decided on raw.
    extra: further numbers that the reward function returned (its dict, less "score").
    """

    status: RewardStatus
    value: float | None = None
    reason: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    raw: float | None = None

    def __post_init__(self) -> None:
        assert (self.value is not None) == (self.status == "scored"), f"{self.status} with value {self.value}"
        assert self.status != "invalid" or self.reason, "an invalid sample needs a reason"


_EXCEPTION = re.compile(r"(?:raised )?[\w.]*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning|Iteration)")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|\([^)]*\)")


def reason_class(reason: str) -> str:
    """A reason without what belongs to one sample alone, to count by: "ValueError: no 3 in 'abc'" becomes "ValueError",
    "returned str 'x', not a number" "returned str, not a number". Full reasons stay with the samples."""
    parts = reason.split(": ")
    for place, part in enumerate(parts):
        if _EXCEPTION.fullmatch(part):
            parts = parts[: place + 1]
            break
    text = " ".join(_QUOTED.sub("", ": ".join(parts[:2])).split())
    return text.replace(" ,", ",")[:80].strip(" :,") or "unknown"


@dataclass
class TrainBatch:
    """The samples of one optimizer step, ragged, in numpy, with each prompt stored once.

    prompts: G arrays int32 [P_g]. group_of: int64 [N], the index into prompts of each sample. samples: N ids.
    responses: N arrays int32 [T_n]. response_mask: N arrays bool [T_n], False where the model did not write the
    token or it must not be trained on. logprobs: N arrays float32 [T_n], of the sampler. advantages: N arrays
    float32 [T_n]. ref_logprobs, proximal_logprobs: N arrays float32 [T_n] or None. on_policy: N arrays bool [T_n] or
    None, True where the token was sampled by the version that is being trained (the log-prob gap is measured there).
    values, returns: N arrays float32 [T_n] or None, of the critic when the batch was scored, and what it should learn.
    """

    samples: list[SampleId]
    prompts: list[np.ndarray]
    group_of: np.ndarray
    responses: list[np.ndarray]
    response_mask: list[np.ndarray]
    logprobs: list[np.ndarray]
    advantages: list[np.ndarray]
    ref_logprobs: list[np.ndarray] | None = None
    proximal_logprobs: list[np.ndarray] | None = None
    on_policy: list[np.ndarray] | None = None
    values: list[np.ndarray] | None = None
    returns: list[np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.samples)
