"""Requests that make a sample of a run: an agent claims one, asks for its turns, and reports its reward."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from tranship.serve.answers import Piece
from tranship.serve.errors import ApiError
from tranship.serve.prompts import with_text
from tranship.serve.requests import ChatRequest
from tranship.types import NotYet, Response, SampleId, Sampling, UserError

MOST_WAIT_S = 60.0
MOST_REASON = 8192
"""Characters of a reason: it is kept with the sample."""
_TICK_S = 0.05
_NOBODY = SampleId(-1, -1)


class Turn(Protocol):
    """A turn that a sample is to get: its prompt int32 [P], the tools that the model was told of, and how it is
    drawn."""

    @property
    def prompt_ids(self) -> np.ndarray: ...

    @property
    def tools(self) -> list[dict[str, Any]]: ...

    @property
    def seed(self) -> int: ...

    @property
    def sampling(self) -> Sampling: ...


class AgentSamples(Protocol):
    """The samples that wait for agents, or are with them. Raises UserError for what cannot be."""

    def claim(self) -> dict[str, Any] | None:
        """One of them, with its id; None if there is none."""
        ...

    def begin(self, key: str, messages: Sequence[dict[str, Any]], cap: int | None) -> Any:
        """The next `Turn` of a sample; None if it is not with an agent."""
        ...

    def finish(self, turn: Any, response: Response, said: dict[str, Any]) -> bool:
        """A turn was answered by these tokens, as this message; False if its sample has ended meanwhile."""
        ...

    def drop(self, turn: Any) -> None:
        """A turn was not answered."""
        ...

    def end(self, key: str, reward: float | None, invalid: str | None) -> bool:
        """A sample has its reward, or is invalid for a reason; False if it is not with an agent."""
        ...


class ClaimRequest(BaseModel):
    """A body of /v1/tranship/samples. wait_s: the answer waits so long for a sample."""

    model_config = ConfigDict(extra="forbid", strict=True)
    wait_s: float = Field(default=10.0, ge=0, le=MOST_WAIT_S)


class RewardReport(BaseModel):
    """A body of /v1/tranship/reward: a sample's reward, or why it is invalid."""

    model_config = ConfigDict(extra="forbid", strict=True)
    sample: str
    reward: float | None = Field(default=None, allow_inf_nan=False)
    invalid: str | None = Field(default=None, min_length=1, max_length=MOST_REASON)

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.reward is None) == (self.invalid is None):
            about = {"field": "reward", "remedy": "give it, or invalid with a reason, and not both"}
            raise PydanticCustomError("invalid", "{field}: {remedy}", about)
        return self


class Recording:
    """The turn of a sample while it is answered. Whatever is not answered whole leaves the sample as it was."""

    def __init__(self, samples: AgentSamples, key: str, turn: Turn) -> None:
        self.turn = turn
        self._samples = samples
        self._key = key
        self._pieces: list[Piece] = []

    def add(self, piece: Piece) -> None:
        """What comes next of the answer; with its end it becomes a part of the sample. Raises ApiError."""
        self._pieces.append(piece)
        if piece.part.finish_reason is None:
            return
        parts = [each.part for each in self._pieces]
        response = Response(
            _NOBODY,
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.logprobs for part in parts]),
            np.concatenate([part.policy_versions for part in parts]),
            piece.part.finish_reason,
        )
        text = "".join(each.text for each in self._pieces)
        calls = [call for each in self._pieces for call in each.calls]
        if not self._samples.finish(self.turn, response, {"role": "assistant", "content": text, "tool_calls": calls}):
            raise gone(self._key)

    def close(self) -> None:
        """Nothing more comes."""
        self._samples.drop(self.turn)


async def claim(samples: AgentSamples, wait_s: float, refusal: Callable[[], ApiError | None]) -> dict[str, Any]:
    """{"sample": one that waits, or null if none came within `wait_s`}. Raises what
    refusal() gives meanwhile."""
    deadline = time.monotonic() + wait_s
    while (found := samples.claim()) is None and time.monotonic() < deadline:
        if (error := refusal()) is not None:
            raise error
        await asyncio.sleep(_TICK_S)
    return {"sample": found}


def begin(samples: AgentSamples, key: str, asked: ChatRequest) -> Recording:
    """The turn that a request asks for. Raises ApiError, and leaves the sample as it is then."""
    try:
        turn = samples.begin(key, [with_text(message) for message in asked.messages], asked.cap)
    except UserError as error:
        raise _refused(error) from error
    if turn is None:
        raise gone(key)
    try:
        _check_request(asked, turn.tools, turn.sampling)
    except ApiError:
        samples.drop(turn)
        raise
    return Recording(samples, key, turn)


def end(samples: AgentSamples, report: RewardReport) -> dict[str, Any]:
    """What is answered to a report. Raises ApiError."""
    try:
        known = samples.end(report.sample, report.reward, report.invalid)
    except UserError as error:
        raise _refused(error) from error
    if not known:
        raise gone(report.sample)
    return {"sample": report.sample, "ended": True}


def gone(key: str) -> ApiError:
    """The error for a sample that nobody makes any more."""
    message = f"the sample {key!r} is not with an agent of this endpoint, or its time is over: claim another one"
    return ApiError(404, message, param="sample", code="sample_not_found")


def _check_request(asked: ChatRequest, tools: Sequence[Mapping[str, Any]], sampling: Sampling) -> None:
    """Raise ApiError for what a turn of a sample cannot have: another sampling than the run's, other tools."""
    own = asked.sampling(sampling.max_response_tokens)
    for name in ("temperature", "top_p", "top_k", "min_p", "stop_token_ids"):
        if getattr(asked, name) is not None and getattr(own, name) != getattr(sampling, name):
            raise _not_here(name, f"the run draws with {getattr(sampling, name)}: leave it out")
    if asked.stop is not None and own.stop_strings != sampling.stop_strings:
        raise _not_here("stop", f"the run's are {list(sampling.stop_strings)}: leave it out")
    if asked.seed is not None:
        raise _not_here("seed", "it follows from the run's: leave it out")
    if asked.num_samples != 1:
        raise _not_here("n", "a sample has one next turn: leave it out")
    if asked.chat_template_kwargs:
        raise _not_here("chat_template_kwargs", "the run's data.template_args hold: leave it out")
    if asked.tools is not None and asked.tools != list(tools):
        raise _not_here("tools", "they are those of the sample: give them as they were claimed, or leave them out")


def _refused(error: UserError) -> ApiError:
    if isinstance(error, NotYet):
        # OpenAI's clients ask again after this status.
        return ApiError(409, str(error), param="sample", code="sample_busy")
    return ApiError(400, str(error), param="sample", code="sample_refused")


def _not_here(name: str, remedy: str) -> ApiError:
    return ApiError(400, f"{name} cannot be chosen for a sample: {remedy}", param=name, code="unsupported_parameter")
