"""What a dock's process has done, in a file beside the slabs: if it is killed, its successor does it again.

An entry is written before the outcome of a message is told to anybody, and before slabs change; a torn one at the end
is as if it had never been. No entry is forced to disk: the fault that this is for is a killed process, not a machine
that lost its power.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import xxhash

_ENTRY = struct.Struct("<IQ")
_MAX_ENTRY = 1 << 28


class Journal:
    """Appends entries (plain values that msgpack carries) to a file, which is made if it is not there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.nbytes = os.fstat(self._file).st_size

    def append(self, *entry: Any) -> None:
        """Write one entry. OSError if the file system is full: nothing of it stays then."""
        data = _encode(entry)
        try:
            written = os.write(self._file, data)
            if written < len(data):
                raise OSError(f"{self.path} has no room for {len(data)} bytes more")
        except OSError:
            os.ftruncate(self._file, self.nbytes)
            raise
        self.nbytes += len(data)

    def start_again(self, *entry: Any) -> None:
        """Replace everything by one entry, at once or not at all."""
        new = self.path.with_name(self.path.name + ".new")
        new.write_bytes(_encode(entry))
        descriptor = os.open(new, os.O_RDWR | os.O_APPEND)
        os.replace(new, self.path)
        os.close(self._file)
        self._file = descriptor
        self.nbytes = os.fstat(descriptor).st_size

    def entries(self) -> Iterator[list[Any]]:
        """All whole entries from the first on. What follows the last whole one is cut off at the end."""
        data = self.path.read_bytes()
        at = 0
        while at + _ENTRY.size <= len(data):
            length, digest = _ENTRY.unpack_from(data, at)
            body = data[at + _ENTRY.size : at + _ENTRY.size + length]
            if length > _MAX_ENTRY or len(body) < length or xxhash.xxh3_64_intdigest(body) != digest:
                break
            yield msgpack.unpackb(body, raw=False, strict_map_key=False)
            at += _ENTRY.size + length
        os.ftruncate(self._file, at)
        self.nbytes = at

    def close(self) -> None:
        """Close the file, which stays."""
        os.close(self._file)


def _encode(entry: tuple[Any, ...]) -> bytes:
    body = msgpack.packb(list(entry))
    assert body is not None
    assert len(body) <= _MAX_ENTRY, len(body)
    return _ENTRY.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body
