"""Bodies of requests: OpenAI's defaults, and a refusal that names the field for everything that cannot be done."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tranship.serve.agents import MOST_REASON, RewardReport, end
from tranship.serve.errors import ApiError
from tranship.serve.requests import ChatRequest, CompletionRequest, parse
from tranship.types import NotYet, Sampling, UserError

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
SURROGATE = rb'{"model": "m", "messages": [{"role": "user", "content": "\ud800"}]}'
COMPLETION = {"model": "m", "prompt": "hi"}


def chat(**fields: Any) -> ChatRequest:
    return parse(ChatRequest, json.dumps(CHAT | fields).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps(COMPLETION | fields).encode())


def test_defaults_are_neutral() -> None:
    for asked in (chat(), completion()):
        assert asked.sampling(7) == Sampling(7, 1.0, 1.0, 0, 0.0, (), ())
        assert (asked.num_samples, asked.seed, bool(asked.stream), asked.return_token_ids) == (1, None, False, False)
    assert chat().cap is None


def test_fields_reach_the_engine() -> None:
    asked = chat(
        temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, stop="a", stop_token_ids=[3], n=2, max_completion_tokens=4
    )
    assert asked.sampling(4) == Sampling(4, 0.5, 0.9, 0, 0.1, (3,), ("a",))
    assert (asked.num_samples, asked.cap) == (2, 4)
    assert completion(top_k=5, stop=["a", "b"]).sampling(4) == Sampling(4, top_k=5, stop_strings=("a", "b"))
    assert chat(temperature=0).sampling(1).temperature == 0.0


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts_in_every_form(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompts == prompts


def test_fields_that_mean_nothing_are_taken_at_that_value_alone() -> None:
    chat(
        frequency_penalty=0,
        presence_penalty=0.0,
        logit_bias={},
        tools=[],
        response_format={"type": "text"},
        store=False,
    )
    chat(**dict.fromkeys(ChatRequest.ONLY))
    completion(echo=False, suffix="", best_of=1)
    completion(**dict.fromkeys(CompletionRequest.ONLY))
    for kind, base in ((ChatRequest, CHAT), (CompletionRequest, COMPLETION)):
        for name in kind.ONLY:
            with pytest.raises(ApiError, match=f"{name} is not supported") as refused:
                parse(kind, json.dumps(base | {name: ["something", "else"]}).encode())
            assert (refused.value.status, refused.value.param) == (400, name)
            assert refused.value.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"frequencypenalty": 0}, "frequencypenalty", "unknown_parameter"),
        ({"stream_options": {"usage": True}, "stream": True}, "stream_options", "unknown_parameter"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "hi"}, "messages", "invalid_value"),
        ({"model": None}, "model", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": True}, "n", "invalid_value"),
        ({"n": 129}, "n", "invalid_value"),
        ({"temperature": "1"}, "temperature", "invalid_value"),
        ({"temperature": -0.1}, "temperature", "invalid_value"),
        ({"temperature": float("nan")}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"min_p": 1}, "min_p", "invalid_value"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens", "invalid_value"),
        ({"stop": ["a", ""]}, "stop", "invalid_value"),
        ({"stop": 3}, "stop", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"logprobs": 1}, "logprobs", "invalid_value"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, param, code)
    assert refused.value.body()["error"]["type"] == "invalid_request_error"


def test_how_many_of_the_likeliest_tokens_are_asked_for() -> None:
    assert [completion(logprobs=count).sampling(4).top_logprobs for count in (None, 0, 3)] == [0, 0, 3]
    assert chat(logprobs=True).sampling(4).top_logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).sampling(4).top_logprobs == 5
    with pytest.raises(ApiError) as refused:
        completion(logprobs=21)
    assert (refused.value.param, refused.value.code) == ("logprobs", "invalid_value")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"3", b"\xff", b"[" * 100_000, b'{"messages": []}', SURROGATE])
def test_bodies_that_are_no_request(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        parse(ChatRequest, body)
    assert refused.value.status == 400


def test_a_reason_is_of_a_bounded_length() -> None:
    body = {"sample": "a", "invalid": "x" * MOST_REASON}
    assert parse(RewardReport, json.dumps(body).encode()).invalid == body["invalid"]
    with pytest.raises(ApiError, match=f"at most {MOST_REASON} characters") as refused:
        parse(RewardReport, json.dumps({"sample": "a", "invalid": body["invalid"] + "x"}).encode())
    assert (refused.value.status, refused.value.param) == (400, "invalid")


@pytest.mark.parametrize(
    ("error", "status", "code"), [(NotYet("later"), 409, "sample_busy"), (UserError("no"), 400, "sample_refused")]
)
def test_a_turn_under_way_is_a_status_after_which_clients_ask_again(error: UserError, status: int, code: str) -> None:
    class Samples:
        def end(self, *_: Any) -> bool:
            raise error

    with pytest.raises(ApiError, match=str(error)) as refused:
        end(Samples(), RewardReport(sample="a", reward=1.0))  # type: ignore[arg-type]
    assert (refused.value.status, refused.value.code) == (status, code)
