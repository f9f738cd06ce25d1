"""What a rollout engine is. The rollout stage uses it through this protocol alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from tranship.layouts.pieces import Piece
from tranship.types import Response, RunError, SampleId, Sampling


@dataclass(frozen=True)
class GroupRequest:
    """Sample `samples` of one prompt. seeds: one for each sample. partials: what an earlier, interrupted try of a
    sample made; generation goes on after it, its tokens keep their log-probs and versions. goes_on: a request whose
    prompt begins with this prompt and a response is to follow, so that it pays to keep what was computed of them."""

    prompt_ids: np.ndarray
    samples: tuple[SampleId, ...]
    seeds: tuple[int, ...]
    sampling: Sampling
    partials: Mapping[SampleId, Response] | None = None
    goes_on: bool = False


@dataclass(frozen=True)
class Capabilities:
    """What an engine can promise. deterministic: a sample's tokens and log-probs do not depend, to the bit, on what
    else runs beside it (fp32, CPU, one thread)."""

    deterministic: bool
    partial_rollout: bool


class RankLost(RunError):
    """Another process of an engine that is spread over several is gone, or does not answer: the engine cannot go on,
    and none of its processes can."""


class SamplesFailed(RunError):
    """A step could not go on with `samples`: the engine has dropped them, the others are not touched."""

    def __init__(self, message: str, samples: Sequence[SampleId]) -> None:
        super().__init__(message)
        self.samples = tuple(samples)


class RolloutEngine(Protocol):
    """One replica's inference weights and the requests that run on it. Nothing here blocks but the work of one step.

    A caller pauses it by not stepping. Before an update it may wait for what runs, abort it and submit the partial
    responses again afterwards, or leave it where it is; then the cache is dealt with as the engine was configured.
    """

    capabilities: Capabilities

    @property
    def policy_version(self) -> int:
        """The version of the weights in use; -1 before the first update."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Samples waiting or running."""
        ...

    @property
    def num_free(self) -> int:
        """Samples that could start at the next step."""
        ...

    def submit(self, request: GroupRequest) -> None:
        """Queue a request. Raises UserError for one that cannot run (prompt + max_response_tokens exceed the context,
        sampling out of range, stop strings without a tokenizer); the others are not touched."""
        ...

    def step(self) -> list[Response]:
        """One iteration: admit waiting requests (prefill), decode one token of each running sample; returns the
        samples that finished. Does nothing when there is nothing to do. Raises SamplesFailed for those whose logits
        are not finite; what else finished in that step is returned by the next one."""
        ...

    def peek(self, starts: Mapping[SampleId, int]) -> list[Response]:
        """What running samples have made beyond their first starts[sample] tokens, finish_reason "abort" as if they
        stopped here; they go on. Left out are samples that have nothing more, that wait, or that are not known."""
        ...

    def abort(self, samples: Sequence[SampleId] | None = None) -> list[Response]:
        """Stop samples (None: all) and return what they have, finish_reason "abort"."""
        ...

    def pieces(self) -> list[Piece]:
        """Where weights go, by Hugging Face names, each logical element once (a tied head is not a second tensor)."""
        ...

    def storage(self, name: str) -> torch.Tensor:
        """The tensor that pieces call `name`, to be written during an update."""
        ...

    def begin_update(self) -> None:
        """Weights are about to be written; no step runs until finish_update."""
        ...

    def finish_update(self, policy_version: int) -> None:
        """All weights are in place: re-pack what kernels keep packed, refresh tied weights, deal with the KV cache of
        running samples as configured, and use the new version."""
        ...

    def probe(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Log-probs float32 [L - 1] of tokens 1.. of a sequence int32 [L] given those before."""
        ...

    def sleep(self) -> None:
        """Free the weights and the cache (no request may be unfinished)."""
        ...

    def wake_up(self) -> None:
        """Allocate again; the next use needs an update first."""
        ...


ROLLOUT_ENGINES: Mapping[str, str] = {
    "native": "tranship.rollout.native.engine:NativeEngine",
    "vllm": "tranship.rollout.vllm.engine:VllmEngine",
}
