"""A client's connection to a dock elsewhere: `call` runs a method there and returns or raises what it does."""

from __future__ import annotations

import secrets
import select
import threading
import time
from collections.abc import Callable
from typing import Any

from tranship.dock.frames import ConnectionLost, connect, receive_frame, send_frame, set_limit, shut
from tranship.dock.place import Place
from tranship.dock.wire import bind, decode_place, decode_reply, encode_request

_ANSWER_S = 60.0
_RETRY_S = 0.05
_PARK_S = 30.0
_LOOK_S = 0.5


class DockLink:
    """One connection under a name, its own in the run: when it ends, what was on lease to that name goes back.

    address: "unix:PATH" or "tcp:HOST:PORT". secret: the run's. answer_s: how long the dock may take to answer, beyond
    what a call allows it to wait; then ConnectionLost, which is also raised when the connection ends. reconnect_s: for
    how long it looks for a dock that is not there, or for its successor, to which it repeats what was not answered.
    meanwhile: called every now and then while it waits for either; what it raises ends the wait. Safe to call from
    several threads, one after the other.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        name: str,
        *,
        answer_s: float = _ANSWER_S,
        reconnect_s: float = 0.0,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        self._address = address
        self._secret = secret
        self._name = name
        self._answer_s = answer_s
        self._reconnect_s = reconnect_s
        self._meanwhile = meanwhile
        self._lock = threading.Lock()
        self._ticket = secrets.randbits(60)
        self.place = self._connect(time.monotonic() + reconnect_s)

    def call(self, method: str, *args: Any, wait_s: float = 0.0, **kwargs: Any) -> Any:
        """What the dock's method returns or raises. wait_s: how long it may wait for an answer that is not None."""
        arguments = bind(method, args, kwargs)
        with self._lock:
            self._ticket += 1
            request = encode_request(method, arguments, wait_s, self._ticket)
            try:
                reply = self._exchange(request, wait_s)
            except ConnectionLost:
                if not self._reconnect_s:
                    raise
                reply = self._repeat(request, wait_s)
        return decode_reply(method, reply)

    def close(self) -> None:
        """End the connection, also under a call that waits; there is no other one then. A second call does nothing."""
        self._reconnect_s = 0.0
        shut(self._stream)

    def _repeat(self, request: bytes, wait_s: float) -> bytes:
        """The answer of a successor to a message that was not answered."""
        until = time.monotonic() + self._reconnect_s
        while True:
            self.place = self._connect(until)
            try:
                return self._exchange(request, wait_s)
            except ConnectionLost:
                if time.monotonic() >= until:
                    raise

    def _connect(self, until: float) -> Place:
        """Connect, and say the name; again and again until then if nobody is there."""
        while True:
            try:
                self._stream = connect(self._address, self._secret, self._answer_s)
                self._waiting_s = 0.0
                return decode_place(self._exchange(self._name.encode(), 0.0))
            except ConnectionLost:
                if time.monotonic() >= until:
                    raise
                # Nothing tells when somebody listens again.
                time.sleep(_RETRY_S)
                if self._meanwhile is not None:
                    self._meanwhile()

    def _exchange(self, request: bytes, wait_s: float) -> bytes:
        try:
            if wait_s != self._waiting_s:
                set_limit(self._stream, self._answer_s + wait_s)
                self._waiting_s = wait_s
            send_frame(self._stream, request)
            self._await(self._answer_s + wait_s)
            return receive_frame(self._stream)
        except TimeoutError as error:
            self._stream.close()
            raise ConnectionLost(
                f"the dock at {self._address} has not answered for {self._answer_s + wait_s:.0f} s"
            ) from error
        except (OSError, ConnectionLost) as error:
            self._stream.close()
            raise ConnectionLost(f"the dock at {self._address} is gone: {error}") from error

    def _await(self, limit_s: float) -> None:
        """Call `meanwhile` every now and then until there is something to read; without it the read itself waits."""
        if self._meanwhile is None:
            return
        poll = select.poll()
        try:
            poll.register(self._stream, select.POLLIN)
        except ValueError as error:
            raise ConnectionLost("it was closed here") from error
        until = time.monotonic() + limit_s
        while not poll.poll(1e3 * min(_LOOK_S, limit_s)):
            if self._stream.fileno() < 0:
                raise ConnectionLost("it was closed here")
            self._meanwhile()
            if time.monotonic() >= until:
                raise TimeoutError


class DockProxy:
    """A dock elsewhere as a process of a run sees it: one connection for messages, and one that hears of changes."""

    def __init__(
        self,
        address: str,
        secret: bytes,
        name: str,
        *,
        reconnect_s: float = 0.0,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        self._link = DockLink(address, secret, name, reconnect_s=reconnect_s, meanwhile=meanwhile)
        self._watcher: DockLink | None = None
        self._make_watcher = lambda: DockLink(address, secret, f"{name}/watch", reconnect_s=reconnect_s)
        self._seen_seq = -1
        self._failure: ConnectionLost | None = None

    @property
    def place(self) -> Place:
        """Where the payload is."""
        return self._link.place

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What the dock's method returns or raises; `wait_s` as in DockLink."""
        return self._link.call(method, *args, **kwargs)

    def watch(self, wakeup: threading.Event) -> None:
        """From now on set `wakeup` whenever the dock's `seq` grows, and when the dock is gone. Once per proxy."""
        assert self._watcher is None, "this dock is watched already"
        self._watcher = self._make_watcher()
        threading.Thread(target=self._watch, args=(self._watcher, wakeup), name="watch-dock", daemon=True).start()

    @property
    def seen_seq(self) -> int:
        """The largest `seq` that the watching thread has heard of (-1: none). ConnectionLost if the dock is gone."""
        if self._failure is not None:
            raise self._failure
        return self._seen_seq

    def close(self) -> None:
        """End both connections."""
        self._link.close()
        if self._watcher is not None:
            self._watcher.close()

    def _watch(self, link: DockLink, wakeup: threading.Event) -> None:
        while True:
            try:
                seq = link.call("changed", self._seen_seq, wait_s=_PARK_S)
            except ConnectionLost as error:
                self._failure = error
                wakeup.set()
                return
            if seq is not None:
                self._seen_seq = seq
                wakeup.set()
