"""What a rollout engine is. The rollout stage uses it through this protocol alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from tranship.layouts.pieces import Piece
from tranship.types import Response, SampleId, Sampling


@dataclass(frozen=True)
class GroupRequest:
    """Sample `samples` of one prompt. seeds: one for each sample. partials: what an earlier, interrupted try of a
    sample made; generation goes on after it, its tokens keep their log-probs and versions."""

    prompt_ids: np.ndarray
    samples: tuple[SampleId, ...]
    seeds: tuple[int, ...]
    sampling: Sampling
    partials: Mapping[SampleId, Response] | None = None


@dataclass(frozen=True)
class Capabilities:
    """What an engine can promise. deterministic: a sample's tokens and log-probs do not depend, to the bit, on what
    else runs beside it (fp32, CPU, one thread)."""

    deterministic: bool
    partial_rollout: bool


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
        samples that finished. Does nothing when there is nothing to do."""
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


ROLLOUT_ENGINES: Mapping[str, str] = {"native": "tranship.rollout.native.engine:NativeEngine"}
