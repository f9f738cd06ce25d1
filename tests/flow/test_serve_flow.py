"""`tranship serve` as a process, driven by the real `openai` client."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from flow_helpers import wait_until
from transformers import AutoModelForCausalLM

from tranship.cli import main
from tranship.models.tokenizer import load_tokenizer
from tranship.rollout import GroupRequest
from tranship.serve import EngineSettings, load_served
from tranship.types import SampleId, Sampling

MODEL = "tiny-random"
MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 3?"}]
IDS: Any = {"return_token_ids": True}
START_S, END_S = 240, 60


@dataclass
class Server:
    """A server that runs. url ends in /v1."""

    process: subprocess.Popen[str]
    url: str
    token: str

    def client(self, **settings: Any) -> openai.OpenAI:
        return openai.OpenAI(
            **{"base_url": self.url, "api_key": self.token, "max_retries": 0, "timeout": 60} | settings
        )

    def health(self) -> dict[str, Any]:
        with urllib.request.urlopen(self.url.removesuffix("/v1") + "/health", timeout=10) as answer:
            return json.load(answer)

    def idle(self) -> bool:
        return self.health()["num_unfinished"] == 0


def start(*options: str) -> Server:
    command = [str(Path(sys.executable).parent / "tranship"), "serve", *options, "--port", "0", "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    limit = threading.Timer(START_S, process.kill)
    limit.start()
    assert process.stdout is not None
    said = {}
    for line in process.stdout:
        word, _, rest = line.partition(" ")
        said[word] = rest.strip()
        if word == "serving":
            break
    limit.cancel()
    assert "serving" in said, f"the server ended or did not start within {START_S} s, and said {said}"
    return Server(process, said["serving"].split()[0], said["token"])


def end(server: Server, how: int = signal.SIGINT) -> tuple[int, str]:
    """(exit code, what it said at last)."""
    server.process.send_signal(how)
    try:
        last, _ = server.process.communicate(timeout=END_S)
    finally:
        server.process.kill()
    return server.process.returncode, last


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Server]:
    running = start(str(tiny_model), "--name", MODEL, "--max-running", "8")
    yield running
    assert end(running) == (0, "end: stopped\n")


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client()


def test_greedy_is_the_engines_greedy(client: openai.OpenAI, tiny_model: Path) -> None:
    loaded = load_served(tiny_model, MODEL, EngineSettings(threads=1))
    prompt = np.array(load_tokenizer(tiny_model).encode("a prompt"), np.int32)
    sample = SampleId(0, 0)
    loaded.engine.submit(GroupRequest(prompt, (sample,), (0,), Sampling(24, temperature=0.0)))
    expected = None
    while loaded.engine.num_unfinished:
        for response in loaded.engine.step():
            expected = response
    assert expected is not None
    by_text = client.completions.create(model=MODEL, prompt="a prompt", temperature=0, max_tokens=24, extra_body=IDS)
    by_ids = client.completions.create(
        model=MODEL, prompt=prompt.tolist(), temperature=0, max_tokens=24, extra_body=IDS
    )
    for answer in (by_text, by_ids):
        (choice,) = answer.choices
        assert choice.token_ids == expected.token_ids.tolist()
        assert choice.prompt_token_ids == prompt.tolist()
        assert choice.text == load_tokenizer(tiny_model).decode(expected.token_ids, skip_special_tokens=True)
        assert choice.finish_reason == expected.finish_reason
        assert answer.policy_version == 0
        assert answer.usage is not None
        counts = (len(prompt), len(expected.token_ids), len(prompt) + len(expected.token_ids))
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == counts


def test_logprobs_are_the_models(client: openai.OpenAI, tiny_model: Path) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        n=3,
        seed=1,
        temperature=0.7,
        top_p=0.8,
        max_tokens=12,
        logprobs=True,
        top_logprobs=4,
        extra_body=IDS,
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    tokenizer = load_tokenizer(tiny_model)
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert answer.prompt_token_ids == prompt
    for choice in answer.choices:
        ids = torch.tensor([prompt + choice.token_ids])
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1] / 0.7, -1)
        expected = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
        assert choice.logprobs is not None
        content = choice.logprobs.content or []
        assert [token.logprob for token in content] == pytest.approx(expected, abs=1e-4)
        assert len(expected) == 12
        assert [token.token for token in content] == [tokenizer.decode([token]) for token in choice.token_ids]
        likeliest = logprobs.topk(4, -1)
        for place, token in enumerate(content):
            assert [other.logprob for other in token.top_logprobs] == pytest.approx(
                likeliest.values[place].tolist(), abs=1e-4
            )
            texts = [tokenizer.decode([other]) for other in likeliest.indices[place].tolist()]
            assert [other.token for other in token.top_logprobs] == texts


def test_completions_have_logprobs_and_offsets(client: openai.OpenAI) -> None:
    (choice,) = client.completions.create(model=MODEL, prompt="x", seed=2, max_tokens=10, logprobs=0).choices
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.text_offset is not None
    assert len(found.tokens) == len(found.token_logprobs or []) == 10
    ascii_only = [(at, token) for at, token in zip(found.text_offset, found.tokens, strict=True) if token.isascii()]
    assert ascii_only
    assert found.text_offset == sorted(found.text_offset)
    assert all(choice.text[at:].startswith(token) for at, token in ascii_only[:1])


def test_completions_tell_the_likeliest_tokens_and_the_sampled_one(client: openai.OpenAI) -> None:
    (choice,) = client.completions.create(model=MODEL, prompt="x", seed=2, max_tokens=10, logprobs=3).choices
    found = choice.logprobs
    assert found is not None
    places = list(zip(found.tokens or [], found.token_logprobs or [], found.top_logprobs or [], strict=True))
    assert len(places) == 10
    assert any(len(others) == 4 for _, _, others in places)
    for token, logprob, others in places:
        assert 1 <= len(others) <= 4
        assert others[token] >= logprob
        assert list(others.values()) == sorted(others.values(), reverse=True)


def test_a_chat_stream_adds_up_to_the_whole(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "messages": MESSAGES, "n": 3, "seed": 7, "max_tokens": 40, "logprobs": True}
    asked["top_logprobs"] = 2
    whole = client.chat.completions.create(**asked, extra_body=IDS)
    chunks = list(
        client.chat.completions.create(**asked, extra_body=IDS, stream=True, stream_options={"include_usage": True})
    )
    assert len(chunks) > 40
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].choices == []
    assert all(chunk.policy_version == 0 and chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert parts[0].delta.role == "assistant"
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert [token for part in parts for token in getattr(part, "token_ids", None) or []] == choice.token_ids
        assert choice.logprobs is not None
        streamed = [token for part in parts if part.logprobs for token in part.logprobs.content or []]
        assert [token.token for token in streamed] == [token.token for token in choice.logprobs.content or []]
        assert all(len(token.top_logprobs) == 2 for token in streamed)
        assert [token.logprob for token in streamed] == pytest.approx(
            [token.logprob for token in choice.logprobs.content or []], abs=1e-5
        )
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
        assert parts[-1].finish_reason == choice.finish_reason


def test_a_completion_stream_adds_up_to_the_whole(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": ["one", "two"], "n": 2, "seed": 7, "max_tokens": 30}
    whole = client.completions.create(**asked)
    texts = dict.fromkeys(range(4), "")
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert len(set(texts.values())) == 4


def test_seeds_decide_whatever_else_is_asked(server: Server) -> None:
    def ask(seed: int | None) -> list[str | None]:
        client = server.client()
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, n=4, seed=seed, max_tokens=20)
        return [choice.message.content for choice in answer.choices]

    alone = [ask(seed) for seed in range(4)]
    assert len({text for texts in alone for text in texts}) == 16
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == alone
    assert ask(None) != ask(None)


def test_stop_strings_are_cut_off(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "x", "seed": 3, "max_tokens": 40}
    plain = client.completions.create(**asked).choices[0].text
    stop = plain[20:23]
    expected = plain[: plain.index(stop)]
    assert stop.isprintable()
    assert len(stop) == 3
    stopped = client.completions.create(**asked, stop=[stop, "never in it"], extra_body=IDS).choices[0]
    assert (stopped.text, stopped.finish_reason) == (expected, "stop")
    assert len(stopped.token_ids) < 40
    streamed = "".join(c.choices[0].text for c in client.completions.create(**asked, stop=stop, stream=True))
    assert streamed == expected
    token = client.completions.create(**asked, extra_body=IDS).choices[0].token_ids[5]
    ended = client.completions.create(**asked, extra_body=IDS | {"stop_token_ids": [token]}).choices[0]
    assert ended.token_ids[-1] == token
    assert ended.finish_reason == "stop"
    assert len(ended.token_ids) <= 6


def test_one_token_is_left_where_top_k_is_one(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "x", "max_tokens": 10}
    greedy = client.completions.create(**asked, temperature=0).choices[0].text
    assert client.completions.create(**asked, extra_body={"top_k": 1}).choices[0].text == greedy
    assert client.completions.create(**asked, top_p=1e-6).choices[0].text == greedy
    assert client.completions.create(**asked, extra_body={"min_p": 0.9999}).choices[0].text == greedy


def test_models_health_and_the_token(server: Server, client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert (card.id, card.max_model_len, card.policy_version) == (MODEL, 2048, 0)
    assert client.models.retrieve(MODEL).id == MODEL
    assert server.health() == {"status": "ok", "num_unfinished": 0}
    for key in ("wrong", server.token[:-1], server.token + "x", "é"):
        with pytest.raises((openai.AuthenticationError, UnicodeError)):
            server.client(api_key=key).models.list()
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(server.url + "/models", timeout=10)
    assert refused.value.code == 401
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model=MODEL, input="x")


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"model": "other"}, 404, "model", "model_not_found"),
        ({"max_tokens": 2048}, 400, "max_tokens", "context_length_exceeded"),
        ({"max_completion_tokens": 2048}, 400, "max_completion_tokens", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "long " * 2048}]}, 400, "max_tokens", "context_length_exceeded"),
        ({"messages": [{"role": "user"}]}, 400, "messages", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages",
            "unsupported_parameter",
        ),
        ({"top_logprobs": 3}, 400, "top_logprobs", "invalid_value"),
        ({"presence_penalty": 1.5}, 400, "presence_penalty", "unsupported_parameter"),
        ({"extra_body": {"best": 1}}, 400, "best", "unknown_parameter"),
        ({"extra_body": {"stop_token_ids": ["x"]}}, 400, "stop_token_ids", "invalid_value"),
        ({"extra_body": {"chat_template_kwargs": {"thinking": True}}}, 400, "messages", "invalid_value"),
    ],
)
def test_errors_of_one_request(
    client: openai.OpenAI, fields: dict[str, Any], status: int, param: str, code: str
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.APIStatusError) as refused:
            client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "stream": stream} | fields)
        assert (refused.value.status_code, refused.value.param, refused.value.code) == (status, param, code)
        assert refused.value.type == "invalid_request_error"


def test_token_ids_that_the_model_does_not_know(client: openai.OpenAI) -> None:
    for prompt in ([5, 2048], [-1], [[5], [2048]], []):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(model=MODEL, prompt=prompt)


def test_parts_of_text_are_one_message(client: openai.OpenAI) -> None:
    parts: Any = [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 3?"}]
    answers = [
        client.chat.completions.create(
            model=MODEL, messages=[MESSAGES[0], {"role": "user", "content": content}], max_tokens=1, extra_body=IDS
        )
        for content in (parts, "What is 2 + 3?")
    ]
    assert answers[0].prompt_token_ids == answers[1].prompt_token_ids


def test_a_client_that_goes_away_frees_its_samples(server: Server, client: openai.OpenAI) -> None:
    wait_until(server.idle, "an idle server", 30)
    asked: Any = {"model": MODEL, "messages": MESSAGES, "n": 100}
    stream = client.chat.completions.create(**asked, stream=True)
    next(iter(stream))
    assert server.health()["num_unfinished"] > 90
    stream.close()
    wait_until(server.idle, "the samples of a closed stream to end", 10)
    with pytest.raises(openai.APITimeoutError):
        server.client(timeout=1.0).chat.completions.create(**asked)
    wait_until(server.idle, "the samples of a client that gave up to end", 10)
    assert client.completions.create(model=MODEL, prompt="x", max_tokens=2).choices[0].finish_reason == "length"


@pytest.mark.slow
def test_ctrl_c_tells_what_still_runs(tiny_model: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    running = start(str(tiny_model), "--token-file", str(token), "--deterministic")
    assert running.token == f"in {token}"
    running.token = token.read_text().strip()
    client = running.client()
    (card,) = client.models.list().data
    assert card.id == str(tiny_model)
    stream = client.chat.completions.create(model=card.id, messages=MESSAGES, n=128, stream=True)
    next(iter(stream))
    began = time.monotonic()
    running.process.send_signal(signal.SIGTERM)
    with pytest.raises(openai.APIError, match="stopping"):
        for _ in stream:
            pass
    assert running.process.wait(END_S) == 0
    assert time.monotonic() - began < END_S
    with pytest.raises(openai.APIConnectionError):
        client.models.list()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-tokens", "4096"], "exceeds the model's context of 2048"),
        (["--dtype", "bf16", "--deterministic"], "needs dtype fp32"),
        (["--engine", "steam"], "--engine: 'steam' is not known"),
        (["--device", "tpu"], "'tpu' is not available here"),
        (["--host", "no.such.host.invalid"], "cannot be listened on"),
        (["--port", "70000"], "--port"),
    ],
)
def test_what_cannot_be_served_is_said(
    tiny_model: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", str(tiny_model), *options])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.startswith("error: ")
