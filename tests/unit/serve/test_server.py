"""Where the server listens, and the token that it asks for."""

from __future__ import annotations

import json
import stat
import threading
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tranship.models.tiny import make_tiny
from tranship.models.tokenizer import load_tokenizer
from tranship.rollout import GroupRequest
from tranship.serve.load import Loaded, Served
from tranship.serve.server import Address, listen, read_token, serve, url_of
from tranship.types import RunError, UserError


def test_a_token_is_made_kept_and_read_again(tmp_path: Path) -> None:
    file = tmp_path / "token"
    made = read_token(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_token(file) == made == file.read_text().strip()
    assert len(made) >= 32
    assert len({made, read_token(None), read_token(None)}) == 3


@pytest.mark.parametrize(
    "content", ["", "\n", "short", "two words that are long enough", "two\nlines-long-enough", "é" * 20]
)
def test_files_that_hold_no_token(content: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(content)
    with pytest.raises(UserError, match="holds no token"):
        read_token(file)


def test_token_files_that_cannot_be_used(tmp_path: Path) -> None:
    for file in (tmp_path, tmp_path / "gone" / "token"):
        with pytest.raises(UserError, match="--token-file"):
            read_token(file)


def test_addresses() -> None:
    with listen(Address("127.0.0.1", 0, "t")) as bound:
        assert bound.getsockname()[0] == "127.0.0.1"
        port = bound.getsockname()[1]
        assert url_of(bound) == f"http://127.0.0.1:{port}/v1"
        bound.listen()
        with pytest.raises(UserError, match=f"port {port} cannot be listened on"):
            listen(Address("127.0.0.1", port, "t"))
    with pytest.raises(UserError, match="cannot be listened on"):
        listen(Address("no.such.host.invalid", 0, "t"))


class DyingEngine:
    """Cannot even stop what it was given."""

    policy_version = 0
    num_unfinished = 0

    def submit(self, request: GroupRequest) -> None:
        """Take it."""

    def step(self) -> None:
        raise MemoryError("a step")

    def abort(self, samples: object = None) -> None:
        raise MemoryError("an end")


def test_a_server_whose_engine_is_gone_ends(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = load_tokenizer(make_tiny(tmp_path / "model", hidden=32, layers=1))
    loaded = SimpleNamespace(served=Served("m", tokenizer, tokenizer, max_tokens=100), engine=DyingEngine())
    answers: list[Any] = []

    def ask(url: str) -> None:
        headers = {"Authorization": "Bearer a-token-for-this-test", "Content-Type": "application/json"}
        body = json.dumps({"model": "m", "prompt": "x"}).encode()
        try:
            urllib.request.urlopen(urllib.request.Request(f"{url}/completions", body, headers), timeout=20)
        except urllib.error.HTTPError as error:
            answers.append((error.code, json.load(error)))

    threads: list[threading.Thread] = []

    def say(url: str) -> None:
        threads.append(threading.Thread(target=ask, args=(url,)))
        threads[0].start()

    with pytest.raises(RunError, match="the engine's thread has ended"):
        serve(cast(Loaded, loaded), Address("127.0.0.1", 0, "a-token-for-this-test"), say)
    threads[0].join(20)
    ((status, body),) = answers
    assert (status, body["error"]["code"]) == (500, "engine_error")
    assert "MemoryError: an end" in capfd.readouterr().err
