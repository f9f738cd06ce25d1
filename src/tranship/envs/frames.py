"""Messages over a socket: four bytes of length, then JSON. Never pickle."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct("<I")
MAX_BYTES = 16 << 20
# What the pool tells the zygote: a letter and a session's number.
COMMAND = struct.Struct("<cQ")
OPEN, END = b"o", b"e"


def pack(message: Any) -> bytes:
    """One frame. message: JSON values (scalars of numpy and torch become Python's). Raises TypeError or ValueError for
    what is none, or is over 16 MiB."""
    body = json.dumps(message, default=_scalar).encode()
    if len(body) > MAX_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is over the limit of {MAX_BYTES}")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that `data` completes, in order. Raises ValueError for what cannot be one."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_BYTES:
                raise ValueError(f"a message of {length} bytes is over the limit of {MAX_BYTES}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            try:
                yield json.loads(body)
            except RecursionError as error:
                raise ValueError("a message is nested too deeply") from error


def _scalar(value: Any) -> Any:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a {type(value).__name__} is not a JSON value")
