"""What goes between the pool, its zygote and its sessions: messages of a bounded size, and commands of a fixed one."""

from __future__ import annotations

import struct
from typing import Any

from tranship import ipc

MAX_BYTES = 16 << 20
# What the pool tells the zygote: a letter and a session's number.
COMMAND = struct.Struct("<cQ")
OPEN, END = b"o", b"e"


def pack(message: Any) -> bytes:
    """One frame. Raises TypeError or ValueError for what is not JSON, or is over 16 MiB."""
    return ipc.pack(message, MAX_BYTES)


def make_reader() -> ipc.FrameReader:
    """A reader that refuses larger messages before it takes memory for them."""
    return ipc.FrameReader(MAX_BYTES)
