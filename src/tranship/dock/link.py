"""A client's connection to a dock elsewhere: `call` runs a method there and returns or raises what it does."""

from __future__ import annotations

import threading
from typing import Any

from tranship.dock.frames import ConnectionLost, connect, receive_frame, send_frame
from tranship.dock.place import Place
from tranship.dock.wire import bind, decode_place, decode_reply, encode_request

_ANSWER_S = 60.0


class DockLink:
    """One connection under a name, its own in the run: when it ends, what was on lease to that name goes back.

    address: "unix:PATH" or "tcp:HOST:PORT". secret: the run's. answer_s: how long the dock may take to answer, beyond
    what a call allows it to wait; then ConnectionLost, which is also raised when the connection ends. Safe to call from
    several threads, one after the other.
    """

    def __init__(self, address: str, secret: bytes, name: str, *, answer_s: float = _ANSWER_S) -> None:
        self._address = address
        self._answer_s = answer_s
        self._lock = threading.Lock()
        self._stream = connect(address, secret, answer_s)
        with self._lock:
            self.place: Place = decode_place(self._exchange(name.encode(), 0.0))

    def call(self, method: str, *args: Any, wait_s: float = 0.0, **kwargs: Any) -> Any:
        """What the dock's method returns or raises. wait_s: how long it may wait for an answer that is not None."""
        request = encode_request(method, bind(method, args, kwargs), wait_s)
        with self._lock:
            reply = self._exchange(request, wait_s)
        return decode_reply(method, reply)

    def close(self) -> None:
        """End the connection. A second call does nothing."""
        self._stream.close()

    def _exchange(self, request: bytes, wait_s: float) -> bytes:
        try:
            self._stream.settimeout(self._answer_s + wait_s)
            send_frame(self._stream, request)
            return receive_frame(self._stream)
        except TimeoutError as error:
            self._stream.close()
            raise ConnectionLost(
                f"the dock at {self._address} has not answered for {self._answer_s + wait_s:.0f} s"
            ) from error
        except (OSError, ConnectionLost) as error:
            self._stream.close()
            raise ConnectionLost(f"the dock at {self._address} is gone: {error}") from error
