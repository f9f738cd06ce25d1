"""Rewards from a server on 127.0.0.1 that answers, is slow, fails and talks nonsense."""

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tranship.rewards import RewardPool, RewardRequest, Term
from tranship.rewards.http import MAX_ANSWER_BYTES
from tranship.types import Score, UserError


class Handler(BaseHTTPRequestHandler):
    seen: list[tuple[dict[str, Any], dict[str, str]]]
    tries: Counter[str]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append((body, dict(self.headers)))
        kind = body["solution_str"]
        self.tries[kind] += 1
        if kind == "sleep":
            time.sleep(3)
        elif kind == "500" or (kind == "once 503" and self.tries[kind] == 1):
            self._answer(503 if kind == "once 503" else 500, b"no")
        elif kind == "404":
            self._answer(404, b"no")
        elif kind == "garbage":
            self._answer(200, b"\xff<html>")
        elif kind == "list":
            self._answer(200, b"[1.0]")
        elif kind == "no score":
            self._answer(200, b'{"reward": 1}')
        elif kind == "nan":
            self._answer(200, b'{"score": NaN}')
        elif kind == "masked":
            self._answer(200, b'{"masked": true}')
        elif kind == "huge":
            self._answer(200, b" " * (MAX_ANSWER_BYTES + 1))
        elif kind == "redirect":
            self.send_response(302)
            self.send_header("Location", "file:///etc/passwd")
            self.end_headers()
        elif kind == "hang up":
            self.connection.close()
        else:
            time.sleep(0.2 if kind == "slow" else 0)
            self._answer(200, json.dumps({"score": 0.5, "judge": "mine"}).encode())

    def _answer(self, status: int, body: bytes) -> None:
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            pass

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Listener(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads = True


class Server:
    def __init__(self) -> None:
        self.handler = type("One", (Handler,), {"seen": [], "tries": Counter()})
        self._server = Listener(("127.0.0.1", 0), self.handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/score"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def score(url: str, *kinds: str, timeout_s: float = 5.0, **args: Any) -> list[Score]:
    with RewardPool([Term("score", url, args)], 1, timeout_s) as pool:
        return pool.score_all([RewardRequest("s", kind, "7") for kind in kinds])


def test_the_request_and_its_answer(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_TOKEN", "abc")
    args = {"headers": {"X-Run": "9"}, "token_env": "JUDGE_TOKEN", "more": {"rubric": "short"}}
    request = RewardRequest(
        "s", "fine", "7", {"a": 1}, prompt="p", num_tokens=2, max_response_tokens=9, completion_ids=[1, 2]
    )
    with RewardPool([Term("score", server.url, args)], 1, 5.0) as pool:
        assert pool.score_all([request]) == [Score("scored", 0.5, extra={"judge": "mine"})]
    ((body, headers),) = server.handler.seen
    assert body == {**request.to_row(), "rubric": "short"}
    assert (headers["X-Run"], headers["Authorization"]) == ("9", "Bearer abc")
    assert headers["Content-Type"] == "application/json"


def test_what_is_no_answer_is_invalid_and_said(server: Server):
    expected = {
        "500": ("answered 500 Internal Server Error", 3),
        "404": ("answered 404 Not Found", 1),
        "garbage": ("answered what is no JSON", 1),
        "list": ("not an object with score", 1),
        "no score": ("returned a dict without 'score' (keys: reward)", 1),
        "nan": ("returned nan", 1),
        "huge": (f"answered more than {MAX_ANSWER_BYTES} bytes", 1),
        "redirect": ("answered 302 Found", 1),
        "hang up": ("RemoteProtocolError", 3),
    }
    *bad, good = score(server.url, *expected, "fine")
    assert good.value == 0.5
    for (kind, (reason, tries)), found in zip(expected.items(), bad, strict=True):
        assert (kind, found.status) == (kind, "invalid")
        assert reason in found.reason
        assert (kind, server.handler.tries[kind]) == (kind, tries)


def test_a_server_that_is_busy_is_asked_again(server: Server):
    assert score(server.url, "once 503", "masked") == [
        Score("scored", 0.5, extra={"judge": "mine"}),
        Score("masked"),
    ]
    assert server.handler.tries["once 503"] == 2
    assert score(server.url, "500", retries=0)[0].reason.endswith("answered 500 Internal Server Error")
    assert server.handler.tries["500"] == 1


def test_slow_answers_are_awaited_together_and_one_that_never_comes_costs_itself(server: Server):
    with RewardPool([Term("score", server.url)], 1, 2.0) as pool:
        started = time.monotonic()
        scores = pool.score_all([RewardRequest("s", kind) for kind in [*["slow"] * 60, "sleep"]])
        assert time.monotonic() - started < 10
    assert [one.value for one in scores] == [0.5] * 60 + [None]
    assert scores[-1].reason == "timed out after 2 s"


def test_a_server_that_is_not_there(server: Server):
    server.close()
    assert "ConnectError" in score(server.url, "fine", retries=1)[0].reason


@pytest.mark.parametrize(
    ("url", "args", "message"),
    [
        ("http://", {}, "names no host"),
        ("http://127.0.0.1/x", {"retries": 99}, "retries 99 is not within 0 and 10"),
        ("http://127.0.0.1/x", {"token_env": "NO_SUCH_TOKEN"}, "the environment variable NO_SUCH_TOKEN is not set"),
        ("https://127.0.0.1/x", {"tries": 1}, "'tries'"),
    ],
)
def test_wrong_settings_are_refused_at_the_start(url: str, args: dict, message: str):
    with pytest.raises(UserError, match=message):
        score(url, **args)
