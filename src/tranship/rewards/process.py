"""The pool's side of one worker process: its pipes, what it does now, and how it ends."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from tranship.ipc import FrameReader, pack
from tranship.rewards.log import Log

_EXIT_GRACE_S = 0.5
_CHUNK = 1 << 16
_PIPE_BYTES = 1 << 20


@dataclass(frozen=True)
class Task:
    """A sample to score: `key` names it, `number` does so in messages, `frame` is what the worker is sent.

    alone: it is given to a worker that has nothing else, and nothing else is given to that worker meanwhile.
    """

    key: Hashable
    number: int
    frame: bytes
    alone: bool = False


@dataclass
class Running:
    """A task that a worker has: which term it is at, and when that one is over the limit (time.monotonic's clock)."""

    task: Task
    deadline: float
    term: int = 0

    def move(self, term: int | None, limit_s: float) -> None:
        """Its next term begins now; None: it waits for its turn, which has no limit of its own."""
        if term is None:
            self.deadline = math.inf
        else:
            self.term = term
            self.deadline = time.monotonic() + limit_s


class WorkerProcess:
    """A started worker. It is ready once it has answered the setup; `in_flight` is how many tasks it then takes.

    running: its tasks by number. start_deadline: when its start is over the limit, on time.monotonic's clock. log: gets
    what it prints; None: that goes to this process's stderr.
    """

    def __init__(self, setup: dict[str, Any], start_timeout_s: float, log: Log | None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tranship.rewards.worker_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if log else None,
            env={"OMP_NUM_THREADS": "1", **os.environ},
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.input_fd = self._process.stdin.fileno()
        self.output_fd = self._process.stdout.fileno()
        self.printed_fd = self._process.stderr.fileno() if self._process.stderr is not None else None
        for descriptor in (self.input_fd, self.output_fd, self.printed_fd):
            if descriptor is not None:
                os.set_blocking(descriptor, False)
        self.ready = False
        self.in_flight = 0
        self.running: dict[int, Running] = {}
        self.start_deadline: float | None = time.monotonic() + start_timeout_s
        self._log = log
        self._frames = FrameReader()
        self._unsent = memoryview(b"")
        self._send(pack(setup))

    def takes(self, task: Task) -> bool:
        """Whether it can be given this task now."""
        if not self.running:
            return self.ready
        return len(self.running) < self.in_flight and not task.alone and not self.works_alone

    @property
    def works_alone(self) -> bool:
        """Whether it has a task that wants no other beside it."""
        return any(running.task.alone for running in self.running.values())

    @property
    def deadline(self) -> float | None:
        """When the first of its tasks, or its start, is over the limit."""
        return min((running.deadline for running in self.running.values()), default=self.start_deadline)

    @property
    def has_unsent(self) -> bool:
        """Whether `flush` has something to do once the pipe takes more."""
        return len(self._unsent) > 0

    def give(self, task: Task, limit_s: float) -> None:
        """Start a task; its limit counts from now."""
        assert self.takes(task)
        self.running[task.number] = Running(task, time.monotonic() + limit_s)
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

    def read_printed(self) -> bool:
        """Move what it printed to the log; whether it may print more."""
        assert self.printed_fd is not None
        assert self._log is not None
        try:
            data = os.read(self.printed_fd, _CHUNK)
        except BlockingIOError:
            return True
        self._log.write(data)
        return bool(data)

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
        if self._log is not None:
            self._drain_printed()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
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

    def was_killed(self) -> bool:
        """Whether it has ended by a signal that a process does not send itself by accident (SIGKILL, SIGTERM)."""
        return self._process.poll() in (-signal.SIGKILL, -signal.SIGTERM)

    def _drain_printed(self) -> None:
        # A process that left the group may hold the pipe and go on: what a pipe can hold is all that is waited for.
        assert self.printed_fd is not None
        assert self._log is not None
        for _ in range(_PIPE_BYTES // _CHUNK):
            try:
                data = os.read(self.printed_fd, _CHUNK)
            except BlockingIOError:
                return
            if not data:
                return
            self._log.write(data)

    def _send(self, frame: bytes) -> None:
        self._unsent = memoryview(bytes(self._unsent) + frame)
        self.flush()
