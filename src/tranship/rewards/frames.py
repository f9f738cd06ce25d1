"""Messages over a pipe: four bytes of length, then msgpack. Never pickle."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

import msgpack

_LENGTH = struct.Struct("<I")
_JSON = 1


def pack(message: Any) -> bytes:
    """One frame. message: JSON values; whole numbers of any size (which msgpack alone refuses) come back equal."""
    try:
        body = msgpack.packb(message, unicode_errors="surrogatepass")
    except OverflowError:
        body = msgpack.packb(msgpack.ExtType(_JSON, json.dumps(message).encode()))
    assert isinstance(body, bytes)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that `data` completes, in order."""
        self._buffer += data
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH.size : end])
            del self._buffer[:end]
            yield msgpack.unpackb(body, ext_hook=_unpack_json, unicode_errors="surrogatepass", strict_map_key=False)


def _unpack_json(code: int, data: bytes) -> Any:
    assert code == _JSON, code
    return json.loads(data)
