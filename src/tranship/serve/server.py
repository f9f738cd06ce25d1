"""The process that listens: a socket, a token, an HTTP server around the endpoint, and its end in good order."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from tranship.serve.app import Endpoint
from tranship.serve.desk import Desk
from tranship.serve.load import Loaded
from tranship.serve.runner import Runner
from tranship.types import RunError, UserError

GRACE_S = 5.0
"""How long running requests may go on after the first Ctrl-C."""
_CLOSE_S = 5.0
_TICK_S = 0.1
_LEAST_TOKEN = 16


@dataclass(frozen=True)
class Address:
    """Where to listen. port 0: any free one. token: what clients must show."""

    host: str
    port: int
    token: str


def read_token(file: Path | None) -> str:
    """The token of a file; a new one where there is no file, and one that is written, for its owner alone, where the
    named file is not there yet. Raises UserError for a file that holds no token or cannot be read or written."""
    if file is None:
        return secrets.token_urlsafe(32)
    try:
        if file.exists():
            token = file.read_text(encoding="utf-8").strip()
        else:
            token = secrets.token_urlsafe(32)
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as made:
                made.write(token + "\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--token-file {file} cannot be used: {error}: choose another place") from error
    if len(token) < _LEAST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise UserError(
            f"--token-file {file} holds no token: it is one line of at least {_LEAST_TOKEN} letters and digits; remove "
            "the file to have one made"
        )
    return token


def listen(address: Address) -> socket.socket:
    """A bound socket. Raises UserError where the address cannot be had."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(place)
    except OSError as error:
        raise UserError(
            f"{address.host} port {address.port} cannot be listened on: {error.strerror or error}: choose another "
            "--host or --port (0: any free one)"
        ) from error
    return bound


def url_of(bound: socket.socket) -> str:
    """The base URL that clients use."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


def serve(loaded: Loaded, address: Address, say: Callable[[str], None]) -> None:
    """Answer requests until Ctrl-C or SIGTERM; what runs then has GRACE_S to end, and is stopped after that.

    say(line) is told where to ask, once requests are taken. A second signal ends it at once. Raises UserError if the
    address cannot be had, RunError if the engine's thread has ended.
    """
    with listen(address) as bound:
        runner = Runner(loaded.engine)
        endpoint = Endpoint(loaded.served, runner.desk, address.token)
        try:
            HttpServer(endpoint, runner.desk, lambda: say(url_of(bound)), lambda: runner.working).run(sockets=[bound])
            gone = not runner.working
        finally:
            runner.close()
    if gone:
        raise RunError("the engine's thread has ended: see above")


class HttpServer(uvicorn.Server):
    """uvicorn with an end of our own: signals are requests to stop, and running requests are told.

    ready is called once requests are taken. working: where it says no more, the server stops.
    """

    def __init__(
        self, endpoint: Endpoint, desk: Desk, ready: Callable[[], None], working: Callable[[], bool] = lambda: True
    ) -> None:
        super().__init__(
            uvicorn.Config(
                endpoint.app(),
                http="h11",
                loop="asyncio",
                ws="none",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=int(GRACE_S + _CLOSE_S),
            )
        )
        self._desk = desk
        self._ready = ready
        self._working = working

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self._ready()
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        """Stop when the engine is gone; when stopping, let requests end for a while, then end them."""
        while not self.should_exit:
            await asyncio.sleep(_TICK_S)
            if not self._working():
                self.should_exit = True
        deadline = asyncio.get_running_loop().time() + GRACE_S
        while self._desk.num_unfinished and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(_TICK_S)
        self._desk.refuse()
