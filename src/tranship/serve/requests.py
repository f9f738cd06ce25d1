"""Requests as clients write them: OpenAI's fields with OpenAI's defaults, a few further ones, and nothing else.

What cannot be done is refused, never ignored: an unknown field, and a known one with a value that would have an effect
that this server does not have. Nothing is taken from a model's own generation settings.
"""

from __future__ import annotations

import json
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from tranship.serve.errors import ApiError
from tranship.serve.tool_calls import check_tools
from tranship.types import Sampling

MOST_SAMPLES = 1024
"""Of one request: its prompts times n."""
MOST_TOP = 20
"""Other tokens at one place of a response."""

_Strings = str | list[str] | None


class StreamOptions(BaseModel):
    """include_usage: one more chunk at the end, with the counts of tokens."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class Request(BaseModel):
    """What completions and chat completions share. Not OpenAI's: top_k, min_p, stop_token_ids, skip_special_tokens,
    return_token_ids, named as other servers name them.

    ONLY: fields that are accepted with these values alone (and null), because they then mean nothing.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    ONLY: ClassVar[dict[str, tuple[Any, ...]]] = {
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "repetition_penalty": (1,),
        "logit_bias": ({},),
        "service_tier": ("auto", "default"),
        "user": (),
    }

    model: str
    n: int | None = Field(default=None, ge=1, le=128)
    seed: int | None = None
    stop: _Strings = None
    stop_token_ids: list[int] | None = None
    temperature: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, lt=1)
    max_tokens: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool = True
    return_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_idle_fields(cls, values: Any) -> Any:
        """Drop the fields of ONLY; an error names one that has another value."""
        if not isinstance(values, dict):
            return values
        for name, allowed in cls.ONLY.items():
            value = values.get(name)
            if value is not None and value not in allowed:
                shown = " or ".join(json.dumps(each) for each in allowed)
                remedy = f"leave it out, or give {shown}" if allowed else "leave it out"
                raise PydanticCustomError("unsupported", "{field} is not supported: {remedy}", _about(name, remedy))
        return {name: value for name, value in values.items() if name not in cls.ONLY}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "invalid",
                "{field} belongs to a stream: {remedy}",
                _about("stream_options", "set stream, or leave it out"),
            )
        if not all(self.stop_strings):
            raise PydanticCustomError("invalid", "{field} has an empty string: {remedy}", _about("stop", "drop it"))
        return self

    @property
    def num_samples(self) -> int:
        """Samples of each prompt."""
        return self.n or 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Text that ends a response, and is not part of it."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, max_response_tokens: int) -> Sampling:
        """The same in the engine's words."""
        return Sampling(
            max_response_tokens=max_response_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            stop_strings=self.stop_strings,
            top_logprobs=self.num_top,
        )

    @property
    def num_top(self) -> int:
        """How many of the likeliest tokens are told at each place."""
        return 0


class CompletionRequest(Request):
    """A body of /v1/completions. logprobs: so many of the likeliest tokens at each place, beside the sampled
    one. add_special_tokens: text gets
    what the tokenizer puts before any text; token ids are taken as they are."""

    ONLY = Request.ONLY | {"echo": (False,), "suffix": ("",), "best_of": (1,)}

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=MOST_TOP)
    add_special_tokens: bool = True

    @property
    def num_top(self) -> int:
        return self.logprobs or 0

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry a prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return self.prompt  # type: ignore[return-value]


class ChatRequest(Request):
    """A body of /v1/chat/completions. chat_template_kwargs: further variables of the chat template. tool_choice "none":
    the template is told of no tool, and no call is read. sample: the answer is a turn of this sample of a run."""

    ONLY = Request.ONLY | {
        "parallel_tool_calls": (True,),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "modalities": (["text"],),
        "store": (False,),
        "reasoning_effort": (),
        "verbosity": (),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "metadata": ({},),
    }

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_TOP)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    sample: str | None = None

    @model_validator(mode="after")
    def _possible_tools(self) -> Self:
        if self.tool_choice not in (None, "none", "auto"):
            remedy = 'no call can be forced: give "auto" or "none"'
            about = _about("tool_choice", remedy)
            raise PydanticCustomError("unsupported", "{field} is not supported: {remedy}", about)
        if wrong := check_tools(self.tools or ()):
            raise PydanticCustomError("invalid", "{field}: {remedy}", _about("tools", wrong))
        return self

    @model_validator(mode="after")
    def _one_cap(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise PydanticCustomError(
                "invalid",
                "{field} differs from max_tokens: {remedy}",
                _about("max_completion_tokens", "give one of them"),
            )
        return self

    @model_validator(mode="after")
    def _logprobs_for_top(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError(
                "invalid", "{field} belongs to logprobs: {remedy}", _about("top_logprobs", "set logprobs")
            )
        return self

    @property
    def num_top(self) -> int:
        return self.top_logprobs or 0

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else list(self.tools or ())

    @property
    def cap(self) -> int | None:
        """Most tokens of a response; None: what is left of the context."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


R = TypeVar("R", bound=BaseModel)


def parse(kind: type[R], body: bytes) -> R:
    """The request in a body. Raises ApiError naming the first field that is wrong."""
    try:
        values = json.loads(body)
        if b"\\ud" in body.lower():
            json.dumps(values, ensure_ascii=False).encode()  # Half a surrogate pair is no text.
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ApiError(400, f"the body is a JSON {type(values).__name__}, not an object")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise _told(error) from error


def _about(field: str, remedy: str) -> dict[str, str]:
    return {"field": field, "remedy": remedy}


def _told(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    path = [str(part) for part in first["loc"]]
    context = first.get("ctx") or {}
    param = str(context["field"]) if "field" in context else path[0] if path else None
    match first["type"]:
        case "unsupported":
            return ApiError(400, first["msg"], param=param, code="unsupported_parameter")
        case "extra_forbidden":
            return ApiError(
                400, f"{'.'.join(path)} is not known here: leave it out", param=param, code="unknown_parameter"
            )
        case "missing":
            return ApiError(400, f"{param} is missing", param=param, code="missing_required_parameter")
        case "invalid":
            return ApiError(400, first["msg"], param=param, code="invalid_value")
    given = json.dumps(first["input"], default=str)[:80]
    return ApiError(400, f"{param} is {given}: {first['msg']}", param=param, code="invalid_value")
