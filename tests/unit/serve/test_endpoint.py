"""The endpoint over an engine whose words are given: tools, prompts, and errors of every kind in one shape."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from starlette.testclient import TestClient
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from tranship.models.tiny import make_tiny
from tranship.models.tokenizer import load_tokenizer
from tranship.rollout import GroupRequest, RolloutEngine
from tranship.serve.app import MOST_BODY_BYTES, Endpoint
from tranship.serve.load import Served
from tranship.serve.runner import Runner
from tranship.types import Response, SampleId

TOKEN = "a-token-for-these-tests"
USER = [{"role": "user", "content": "What is 2 + 3?"}]
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.name }} {{ c.function.arguments.a }}){% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{{ mood }}{% endif %}"
)


class SayingEngine:
    """Says `text` to everything, a token a step."""

    policy_version = 3

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.text = ""
        self.prompts: list[str] = []
        self.requests: list[GroupRequest] = []
        self._tokenizer = tokenizer
        self._running: dict[SampleId, int] = {}

    @property
    def num_unfinished(self) -> int:
        return len(self._running)

    def submit(self, request: GroupRequest) -> None:
        self.requests.append(request)
        self.prompts.append(self._tokenizer.decode(request.prompt_ids.tolist()))
        self._ids = np.array(self._tokenizer.encode(self.text), np.int32)[: request.sampling.max_response_tokens]
        self._whole = len(self._ids) < request.sampling.max_response_tokens
        self._running |= dict.fromkeys(request.samples, 0)

    def step(self) -> list[Response]:
        self._running = {sample: made + 1 for sample, made in self._running.items()}
        ended = [sample for sample, made in self._running.items() if made >= len(self._ids)]
        for sample in ended:
            del self._running[sample]
        return [self._response(sample, self._ids, "stop" if self._whole else "length") for sample in ended]

    def peek(self, starts: Mapping[SampleId, int]) -> list[Response]:
        return [
            self._response(s, self._ids[starts[s] : made], "abort") for s, made in self._running.items() if s in starts
        ]

    def abort(self, samples: Sequence[SampleId] | None = None) -> list[Response]:
        self._running.clear()
        return []

    def _response(self, sample: SampleId, ids: np.ndarray, reason: Any) -> Response:
        return Response(sample, ids, np.zeros(len(ids), np.float32), np.full(len(ids), 3, np.int32), reason)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    loaded = load_tokenizer(make_tiny(Path(tmp_path_factory.mktemp("model")), hidden=32, layers=1))
    loaded.chat_template = TEMPLATE
    return loaded


@pytest.fixture
def engine(tokenizer: PreTrainedTokenizerBase) -> SayingEngine:
    return SayingEngine(tokenizer)


@pytest.fixture
def client(tokenizer: PreTrainedTokenizerBase, engine: SayingEngine) -> Iterator[TestClient]:
    served = Served("m", tokenizer, tokenizer, max_tokens=400)
    runner = Runner(cast(RolloutEngine, engine))
    app = Endpoint(served, runner.desk, TOKEN).app()
    with TestClient(app, headers={"authorization": f"Bearer {TOKEN}"}, raise_server_exceptions=False) as made:
        yield made
    runner.close()


def ask(client: TestClient, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/chat/completions", json={"model": "m", "messages": USER} | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(client: TestClient, **fields: Any) -> list[dict[str, Any]]:
    answer = client.post("/v1/chat/completions", json={"model": "m", "messages": USER, "stream": True} | fields)
    *events, last = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert last == "[DONE]"
    return [json.loads(event) for event in events]


def test_calls_of_tools(client: TestClient, engine: SayingEngine) -> None:
    engine.text = f"Let me see. {CALL}"
    answer = ask(client, tools=[ADD])
    (choice,) = answer["choices"]
    assert engine.prompts[-1] == "[add]user:What is 2 + 3?;assistant:"
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see. "
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 2, "b": 3}'}
    assert answer["policy_version"] == 3
    chunks = [chunk["choices"][0] for chunk in stream(client, tools=[ADD])]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == "Let me see. "
    assert len(chunks) > 3
    (called,) = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
    assert (called["index"], called["function"]) == (0, call["function"])
    assert chunks[-1]["finish_reason"] == "tool_calls"


def test_what_a_tool_answered_goes_back(client: TestClient, engine: SayingEngine) -> None:
    engine.text = CALL
    said = ask(client, tools=[ADD])["choices"][0]["message"]
    assert said["content"] is None
    engine.text = "It is 5."
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "5"}
    answer = ask(client, tools=[ADD], messages=[*USER, said, result])
    assert engine.prompts[-1] == "[add]user:What is 2 + 3?;assistant:(add 2);tool:5;assistant:"
    assert answer["choices"][0]["message"] == {"role": "assistant", "refusal": None, "content": "It is 5."}
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_conversations_go_on_and_completions_do_not(client: TestClient, engine: SayingEngine) -> None:
    ask(client)
    stream(client)
    client.post("/v1/completions", json={"model": "m", "prompt": "x"})
    assert [request.goes_on for request in engine.requests] == [True, True, False]


def test_calls_that_are_none(client: TestClient, engine: SayingEngine) -> None:
    engine.text = CALL
    for fields in ({}, {"tools": [ADD], "tool_choice": "none"}, {"tools": [ADD], "max_tokens": 5}):
        (choice,) = ask(client, **fields)["choices"]
        assert "tool_calls" not in choice["message"]
        assert CALL.startswith(choice["message"]["content"])
        assert choice["finish_reason"] == ("length" if "max_tokens" in fields else "stop")
        assert engine.prompts[-1].startswith("user:") == (fields.get("tool_choice") == "none" or not fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [ADD], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        ({"tools": [ADD], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"messages": [{"role": "user", "content": "x", "thinking": "y"}]}, "messages"),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"function": {"name": "f", "arguments": "{"}}],
                    }
                ]
            },
            "messages",
        ),
    ],
)
def test_what_cannot_be_done_with_tools(client: TestClient, fields: dict[str, Any], param: str) -> None:
    answer = client.post("/v1/chat/completions", json={"model": "m", "messages": USER} | fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_variables_of_the_template(client: TestClient, engine: SayingEngine) -> None:
    engine.text = "ok"
    ask(client, chat_template_kwargs={"mood": "gladly "})
    assert engine.prompts[-1].endswith("assistant:gladly ")
    ask(client)
    assert engine.prompts[-1].endswith("assistant:")


def test_prompts_of_completions_are_encoded_as_they_are(
    client: TestClient, engine: SayingEngine, tokenizer: Any
) -> None:
    engine.text = "ok"

    def ids(**fields: Any) -> list[int]:
        asked = {"model": "m", "return_token_ids": True} | fields
        return client.post("/v1/completions", json=asked).json()["choices"][0]["prompt_token_ids"]

    written = "<|im_start|>user\nhi<|im_end|>\n"
    assert ids(prompt=written) == tokenizer.encode(written)
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") in ids(prompt=written)
    assert ids(prompt=[5, 6]) == [5, 6]
    before, tokenizer.backend_tokenizer.post_processor = (
        tokenizer.backend_tokenizer.post_processor,
        TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]),
    )
    try:
        assert ids(prompt="hi") == [1, *ids(prompt="hi", add_special_tokens=False)]
    finally:
        tokenizer.backend_tokenizer.post_processor = before


def test_special_text_of_messages_stays_text(client: TestClient, engine: SayingEngine, tokenizer: Any) -> None:
    engine.text = "ok"
    answer = ask(client, messages=[{"role": "user", "content": "<|im_end|>"}], return_token_ids=True)
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in answer["prompt_token_ids"]


def test_special_tokens_are_shown_where_asked_for(client: TestClient, engine: SayingEngine) -> None:
    engine.text = "a<|im_start|>b"
    assert ask(client)["choices"][0]["message"]["content"] == "ab"
    assert ask(client, skip_special_tokens=False)["choices"][0]["message"]["content"] == engine.text


def test_errors_have_one_shape(client: TestClient, engine: SayingEngine) -> None:
    asked = {"model": "m", "prompt": "x"}
    for answer, status in (
        (client.get("/v1/nothing"), 404),
        (client.get("/v1/completions"), 405),
        (client.post("/v1/completions", content=b"{"), 400),
        (client.post("/v1/completions", content=b" " * (MOST_BODY_BYTES + 1)), 413),
        (client.post("/v1/completions", json=asked, headers={"authorization": "Bearer no"}), 401),
        (client.post("/v1/completions", json=asked, headers={"authorization": f"Basic {TOKEN}"}), 401),
        (client.post("/v1/completions", json=asked | {"prompt": ["x"] * 20, "n": 100}), 400),
        (client.post("/v1/completions", json=asked | {"prompt": [[]]}), 400),
    ):
        assert answer.status_code == status
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}
    assert engine.prompts == []


def test_a_bug_in_the_engine_ends_one_request(
    client: TestClient, engine: SayingEngine, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = {"model": "m", "prompt": "x"}
    engine.text = "\ud800"  # It cannot be encoded.
    answer = client.post("/v1/completions", json=asked)
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert "TypeError" in capfd.readouterr().err
    engine.text = "fine"
    assert client.post("/v1/completions", json=asked).json()["choices"][0]["text"] == "fine"
    assert client.get("/health", headers={"authorization": ""}).json() == {"status": "ok", "num_unfinished": 0}
