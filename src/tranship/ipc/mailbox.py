"""Between a caller that must not wait and a thread that serves it: answers, a fault, and a nudge."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from tranship.types import RunError

_JOIN_TIMEOUT_S = 20.0

Key = TypeVar("Key")
Answer = TypeVar("Answer")


class Mailbox(Generic[Key, Answer]):
    """Answers by key in any order, and at most one fault, after which none comes.

    wakeup: set whenever there is something to poll. nudge_fd: readable when the thread is to look for work; the thread
    waits on it with its other files, and calls `drain`.
    """

    def __init__(self, wakeup: threading.Event | None) -> None:
        self._wakeup = wakeup
        self._changed = threading.Condition()
        self._answers: deque[tuple[Key, Answer]] = deque()
        self._num_pending = 0
        self._closing = False
        self._fault: str | None = None
        self.nudge_fd, self._nudge_write = os.pipe()
        os.set_blocking(self._nudge_write, False)

    # The caller's side

    @property
    def num_pending(self) -> int:
        """Answers that are expected and that `poll` has not returned yet."""
        return self._num_pending

    def expect(self, count: int = 1) -> None:
        """So many more answers are wanted (a negative count: fewer)."""
        with self._changed:
            assert not self._closing or count <= 0, "the pool is closed"
            self._num_pending += count

    def poll(self) -> list[tuple[Key, Answer]]:
        """The answers that have come since the last call. Raises RunError if none can come any more."""
        with self._changed:
            if self._fault is not None:
                raise RunError(self._fault)
            found = list(self._answers)
            self._answers.clear()
            self._num_pending -= len(found)
        return found

    def wait(self, timeout_s: float) -> bool:
        """Wait until `poll` has something to return or to raise, at most so long; says whether it has."""
        return self._wait_for(lambda: bool(self._answers), timeout_s)

    def await_start(self, is_ready: Callable[[], bool], limit_s: float, otherwise: str) -> str | None:
        """Wait until the thread is ready; returns the fault if it is not, `otherwise` if it was silent for limit_s."""
        done = self._wait_for(is_ready, limit_s)
        return self._fault if done else otherwise

    def nudge(self) -> None:
        """Have the thread look for work."""
        try:
            os.write(self._nudge_write, b"x")
        except BlockingIOError:
            pass  # It is awake anyway.

    def close(self, thread: threading.Thread, what: str) -> bool:
        """End the thread; False if that was done before. what: it ends, for the error if it does not."""
        with self._changed:
            if self._closing:
                return False
            self._closing = True
        self.nudge()
        thread.join(_JOIN_TIMEOUT_S)
        if thread.is_alive():
            raise RunError(f"waited {_JOIN_TIMEOUT_S:.0f} s for {what} to end after SIGKILL")
        os.close(self.nudge_fd)
        os.close(self._nudge_write)
        return True

    # The thread's side

    @property
    def fault(self) -> str | None:
        """Why no answer can come any more."""
        return self._fault

    @property
    def closing(self) -> bool:
        """Whether the thread is to end."""
        return self._closing

    def drain(self) -> None:
        """Take the nudges that have come."""
        os.read(self.nudge_fd, 1 << 12)

    def deliver(self, key: Key, answer: Answer) -> None:
        """An answer is there."""
        with self._changed:
            self._answers.append((key, answer))
        self._tell()

    def fail(self, fault: str) -> None:
        """No answer will come any more; the first reason stands."""
        with self._changed:
            self._fault = self._fault or fault
        self._tell()

    def say_ready(self) -> None:
        """Have `await_start` look again."""
        with self._changed:
            self._changed.notify_all()

    def _tell(self) -> None:
        self.say_ready()
        if self._wakeup is not None:
            self._wakeup.set()

    def _wait_for(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: condition() or self._fault is not None, timeout_s)
