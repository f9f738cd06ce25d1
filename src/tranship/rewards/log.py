"""The file that gets what reward functions print. It never grows without end."""

from __future__ import annotations

from pathlib import Path

MAX_LOG_BYTES = 10_000_000


class Log:
    """Appends to `path`, at most max_bytes for this object; then one line says so, and the rest is forgotten."""

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
        self._file = path.open("ab", buffering=0)
        self._max_bytes = max_bytes
        self._left = max_bytes

    def write(self, data: bytes) -> None:
        """Append what still has room."""
        if self._left == 0 or not data:
            return
        kept = data[: self._left]
        self._file.write(kept)
        self._left -= len(kept)
        if self._left == 0:
            self._file.write(
                f"\n[{self._max_bytes} bytes are written: what is printed from here on is lost]\n".encode()
            )

    def close(self) -> None:
        """End writing."""
        self._file.close()
