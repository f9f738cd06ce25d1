"""The pool's side of its processes: the zygote, and one socket for each session that was forked from it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tranship.envs.frames import COMMAND, END, OPEN, make_reader, pack

_CHUNK = 1 << 16
_SEND_TIMEOUT_S = 10.0


class Zygote:
    """A started zygote. `description` is None until it has answered the setup."""

    def __init__(self, setup: dict[str, Any], start_timeout_s: float, log_file: Path | None) -> None:
        self.control, theirs = socket.socketpair()
        with theirs, log_file.open("ab") if log_file else nullcontext() as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tranship.envs.zygote", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stderr=log,
                # The order of sets of strings, which an environment's answers may show, is the same each time.
                env={"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", **os.environ},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.control.settimeout(_SEND_TIMEOUT_S)
        self.description: dict[str, Any] | None = None
        self.deadline: float | None = time.monotonic() + start_timeout_s
        self._frames = make_reader()
        self.control.sendall(pack(setup))

    def fork(self, session: int) -> socket.socket:
        """Start a session; returns our end of its socket. Raises OSError when the zygote is over."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.control, [COMMAND.pack(OPEN, session)], [theirs.fileno()])
        ours.setblocking(False)
        return ours

    def end(self, session: int) -> None:
        """Kill a session; its end is told by `read`. Raises OSError when the zygote is over."""
        self.control.sendall(COMMAND.pack(END, session))

    def read(self) -> list[Any] | None:
        """The messages that arrived; None when the zygote is over. Call it when there is something to read."""
        try:
            data = self.control.recv(_CHUNK)
        except OSError:
            return None
        return list(self._frames.feed(data)) if data else None

    def close(self, grace_s: float) -> None:
        """End it; it ends its sessions. After grace_s (at once, while it makes the environment) it is killed, and the
        kernel ends the sessions."""
        self.control.close()
        try:
            self._process.wait(grace_s if self.description is not None else 0.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Session:
    """One sample's process as the pool sees it; one request at a time.

    request: a frame that waits for its turn. deadline: when the request that runs is over the limit, on
    time.monotonic's clock; None while it idles. socket: None before its first request, and when it is over. ending: it
    has closed its socket, and the zygote is asked how it ended. fault: why it cannot go on.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.socket: socket.socket | None = None
        self.request: bytes | None = None
        self.deadline: float | None = None
        self.started = 0.0
        self.ending = False
        self.fault: str | None = None
        self._frames = make_reader()
        self._unsent = memoryview(b"")

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something to do once the socket takes more."""
        return len(self._unsent) > 0

    def start(self, timeout_s: float) -> None:
        """Send the waiting request; its limit counts from now."""
        assert self.request is not None
        self._unsent, self.request = memoryview(self.request), None
        self.started = time.monotonic()
        self.deadline = self.started + timeout_s
        self.flush()

    def flush(self) -> None:
        """Write what the socket takes now. A socket that is closed is noticed by `read`."""
        assert self.socket is not None
        try:
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = memoryview(b"")

    def read(self) -> list[Any] | None:
        """The messages that arrived; None when the process is over. Raises ValueError for what is no message."""
        assert self.socket is not None
        try:
            data = self.socket.recv(_CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            return None
        return list(self._frames.feed(data)) if data else None
