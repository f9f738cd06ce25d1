"""The pool's side of one worker process: its pipes, what it does now, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tranship.rewards.frames import FrameReader, pack

_EXIT_GRACE_S = 0.5
_CHUNK = 1 << 16


@dataclass(frozen=True)
class Task:
    """A sample to score: `key` names it, `frame` is what the worker is sent."""

    key: Hashable
    frame: bytes


class WorkerProcess:
    """A started worker. It is ready once it has answered the setup, and has one task at a time.

    deadline: when its start or its task is over the limit, on time.monotonic's clock; None while it idles.
    """

    def __init__(self, setup: dict[str, Any], start_timeout_s: float, log_file: Path | None) -> None:
        with log_file.open("ab") if log_file else nullcontext() as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tranship.rewards.worker_main"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={"OMP_NUM_THREADS": "1", **os.environ},
                start_new_session=True,
                bufsize=0,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.input_fd = self._process.stdin.fileno()
        self.output_fd = self._process.stdout.fileno()
        os.set_blocking(self.input_fd, False)
        os.set_blocking(self.output_fd, False)
        self.ready = False
        self.task: Task | None = None
        self.deadline: float | None = time.monotonic() + start_timeout_s
        self._frames = FrameReader()
        self._unsent = memoryview(b"")
        self._send(pack(setup))

    @property
    def idle(self) -> bool:
        """Whether it can be given a task."""
        return self.ready and self.task is None

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something to do once the pipe takes more."""
        return len(self._unsent) > 0

    def give(self, task: Task, timeout_s: float) -> None:
        """Start a task; its limit counts from now."""
        assert self.idle
        self.task = task
        self.deadline = time.monotonic() + timeout_s
        self._send(task.frame)

    def flush(self) -> None:
        """Write what the pipe takes now. A pipe that is closed is noticed by `read`."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self.input_fd, self._unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._unsent = memoryview(b"")

    def read(self) -> list[Any] | None:
        """The messages that arrived; None when the process has closed its end. Raises ValueError for what is none."""
        try:
            data = os.read(self.output_fd, _CHUNK)
        except BlockingIOError:
            return []
        return list(self._frames.feed(data)) if data else None

    def close_input(self) -> None:
        """Let it end by itself when its task is done."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._unsent = memoryview(b"")

    def wait(self, timeout_s: float) -> None:
        """Wait for its end, at most so long."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass

    def kill(self) -> None:
        """End it and everything that it started, now. It is reaped when this returns."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass  # It is over already.
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def end_reason(self) -> str:
        """How it ended, having closed its pipe: "exited with code 1", "was killed by signal SIGSEGV"."""
        self.wait(_EXIT_GRACE_S)
        code = self._process.poll()
        if code is None:
            return "closed its output"
        if code < 0:
            return f"was killed by signal {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def _send(self, frame: bytes) -> None:
        self._unsent = memoryview(bytes(self._unsent) + frame)
        self.flush()
