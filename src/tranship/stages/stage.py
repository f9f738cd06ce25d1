"""What a stage is, and the stopwatch that all of them share."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

Emit = Callable[[dict[str, Any]], None]


class Stage(Protocol):
    """A non-blocking step: take what is ready, do a bounded piece of work, put what is done."""

    name: str

    def step(self) -> bool:
        """Returns whether anything was done."""
        ...

    def close(self) -> None:
        """Let go of what the stage holds."""
        ...


class Renewal:
    """Says when leases have to be renewed: three times within their length, so that one message may be late."""

    def __init__(self, lease_s: float) -> None:
        self._interval_s = lease_s / 3
        self._last = time.monotonic()

    def due(self) -> bool:
        """Whether it is time; asking starts the next interval then."""
        if time.monotonic() - self._last < self._interval_s:
            return False
        self._last = time.monotonic()
        return True


class Stopwatch:
    """Seconds by name since the last `drain`, of one process."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add the seconds of a block to `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def drain(self) -> dict[str, float]:
        """What was added up since the last call."""
        seconds, self._seconds = dict(self._seconds), defaultdict(float)
        return seconds
