"""Messages over a pipe or a socket: four bytes of length, then JSON. Never pickle."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct("<I")
MAX_BYTES = (1 << 32) - 1


def pack(message: Any, max_bytes: int = MAX_BYTES) -> bytes:
    """One frame. message: JSON values (scalars of numpy and torch become Python's); whole numbers of any size come back
    equal. Raises TypeError or ValueError for what is none, or is over max_bytes."""
    body = json.dumps(message, default=_scalar).encode()
    _check_length(len(body), max_bytes)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a stream of bytes into messages of at most max_bytes."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that `data` completes, in order. Raises ValueError for what cannot be one."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            _check_length(length, self._max_bytes)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            try:
                yield json.loads(body)
            except RecursionError as error:
                raise ValueError("a message is nested too deeply") from error


def _check_length(length: int, max_bytes: int) -> None:
    if length > max_bytes:
        raise ValueError(f"a message of {length} bytes is over the limit of {max_bytes}")


def _scalar(value: Any) -> Any:
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"a {type(value).__name__} is not a JSON value")
