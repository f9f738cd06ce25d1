"""What a dock's process has done, in a file beside the slabs: if it is killed, its successor does it again.

An entry is written before the outcome of a message is told to anybody; a torn one at the end is as if it had never
been. The file is longer than its entries, by zeros: room that was set aside for the next ones. No entry is forced to
disk: the fault that this is for is a killed process, not a machine that lost its power.
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
_STEP = 1 << 18


class Journal:
    """Appends entries (plain values that msgpack carries) to a file, which is made if it is not there. Of one that is
    there `entries` are read before anything else. nbytes: of all entries."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self.nbytes = self._room = os.fstat(self._file).st_size

    def make_room(self, nbytes: int) -> None:
        """So many bytes more can be appended for sure. OSError if the file system is full."""
        need = self.nbytes + nbytes
        if need > self._room:
            self._room = _extend(self._file, self._room, -(-need // _STEP) * _STEP)

    def append(self, *entry: Any) -> None:
        """Write one entry. OSError if the file system is full: nothing of it stays then."""
        data = _encode(entry)
        self.make_room(len(data))
        written = os.pwrite(self._file, data, self.nbytes)
        if written < len(data):
            os.pwrite(self._file, bytes(written), self.nbytes)
            raise OSError(f"{self.path}: {written} of {len(data)} bytes were written")
        self.nbytes += len(data)

    def start_again(self, *entry: Any, room: int = 0) -> None:
        """Replace everything by one entry, with room for more behind it; at once or not at all (OSError)."""
        new = self.path.with_name(self.path.name + ".new")
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            data = _encode(entry)
            size = _extend(descriptor, 0, len(data) + room)
            if os.pwrite(descriptor, data, 0) < len(data):
                raise OSError(f"{new} has no room for {len(data)} bytes")
            os.replace(new, self.path)
        except OSError:
            os.close(descriptor)
            new.unlink(missing_ok=True)
            raise
        os.close(self._file)
        self._file, self.nbytes, self._room = descriptor, len(data), size

    def entries(self) -> Iterator[list[Any]]:
        """All whole entries from the first on. What follows the last whole one is wiped out at the end."""
        data = self.path.read_bytes()
        at = 0
        while at + _ENTRY.size <= len(data):
            length, digest = _ENTRY.unpack_from(data, at)
            body = data[at + _ENTRY.size : at + _ENTRY.size + length]
            if length > _MAX_ENTRY or len(body) < length or xxhash.xxh3_64_intdigest(body) != digest:
                break
            yield msgpack.unpackb(body, raw=False, strict_map_key=False)
            at += _ENTRY.size + length
        os.pwrite(self._file, bytes(len(data) - at), at)
        self.nbytes = at

    def close(self) -> None:
        """Close the file, which stays."""
        os.close(self._file)


def _encode(entry: tuple[Any, ...]) -> bytes:
    body = msgpack.packb(list(entry))
    assert body is not None
    if len(body) > _MAX_ENTRY:
        raise OSError(f"an entry of {len(body)} bytes, and the limit is {_MAX_ENTRY}")
    return _ENTRY.pack(len(body), xxhash.xxh3_64_intdigest(body)) + body


def _extend(descriptor: int, old: int, new: int) -> int:
    """Set memory of the file aside up to its new size, which is returned. OSError if there is none."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, old, new - old)
    else:
        os.truncate(descriptor, new)
    return new
