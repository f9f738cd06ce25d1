"""Processes that run a reward function, each call within a limit. A call that raises, hangs or ends its process costs
its own sample and nothing else."""

from __future__ import annotations

import os
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tranship.rewards.frames import pack
from tranship.rewards.process import Task, WorkerProcess
from tranship.rewards.scoring import invalid
from tranship.types import RunError, Score, UserError

START_TIMEOUT_S = 60.0
_MAX_DEATHS_IN_A_ROW = 3
_CLOSE_GRACE_S = 0.5
_JOIN_TIMEOUT_S = 20.0


class RewardPool:
    """Scores samples with `function_name` in `num_workers` processes of its own.

    function_name: a built-in name, module:function or file.py:function. args: further keyword arguments of each call.
    timeout_s: limit of one call, from when a worker starts on it; then the process is killed and replaced, and the
    sample is invalid. wakeup: set whenever a result is there. memory_bytes: limit of each process's address space.
    log_file: gets what the function prints and the first tracebacks of each process; None: this process's stderr.
    Raises UserError at construction where the function does not import or cannot be called.

    Results come in any order. A thread of the pool starts, feeds and ends the processes; `submit` and `poll` never
    wait. `close` leaves no process; when this process ends without it, the workers end too.
    """

    def __init__(
        self,
        function_name: str,
        args: Mapping[str, Any] | None = None,
        num_workers: int = 1,
        timeout_s: float = 10.0,
        *,
        wakeup: threading.Event | None = None,
        memory_bytes: int | None = None,
        log_file: Path | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        assert num_workers >= 1, num_workers
        self._name = function_name
        self._setup = {
            "function": function_name,
            "args": dict(args or {}),
            "sys_path": [entry or os.getcwd() for entry in sys.path],
            "parent": os.getpid(),
            "memory_bytes": memory_bytes,
        }
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._log_file = log_file
        self._wakeup = wakeup
        self._lock = threading.Condition()
        self._queue: deque[Task] = deque()
        self._results: deque[tuple[Hashable, Score]] = deque()
        self._num_pending = 0
        self._num_ready = 0
        self._fault: str | None = None
        self._closing = False
        self._nudge_read, self._nudge_write = os.pipe()
        os.set_blocking(self._nudge_write, False)
        self._workers: list[WorkerProcess] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._nudge_read, selectors.EVENT_READ, None)
        self._deaths_in_a_row = 0
        # The kernel ends a worker when the thread that started it ends, so one thread does that as long as the pool is.
        self._thread = threading.Thread(target=self._serve, args=(num_workers,), name="reward-pool", daemon=True)
        self._thread.start()
        self._await_start(num_workers)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_pending(self) -> int:
        """Samples submitted whose score `poll` has not returned yet."""
        return self._num_pending

    def submit(
        self,
        key: Hashable,
        data_source: str,
        solution: str,
        ground_truth: Any,
        extra_info: Mapping[str, Any] | None = None,
    ) -> None:
        """Queue a sample; `poll` returns its score under `key`. ground_truth and extra_info are JSON values."""
        row = {
            "data_source": data_source,
            "solution_str": solution,
            "ground_truth": ground_truth,
            "extra_info": None if extra_info is None else dict(extra_info),
        }
        task = Task(key, pack(row))
        with self._lock:
            assert not self._closing, "the pool is closed"
            self._num_pending += 1
            self._queue.append(task)
        self._nudge()

    def poll(self) -> list[tuple[Hashable, Score]]:
        """The scores that have come since the last call. Raises RunError if no worker can be started any more."""
        with self._lock:
            if self._fault is not None and self._num_pending:
                raise RunError(self._fault)
            found = list(self._results)
            self._results.clear()
            self._num_pending -= len(found)
        return found

    def wait(self, timeout_s: float) -> bool:
        """Wait until `poll` has something to return or to raise, at most so long; says whether it has."""
        with self._lock:
            return self._lock.wait_for(lambda: bool(self._results) or self._fault is not None, timeout_s)

    def score_all(self, rows: Sequence[tuple[str, str, Any, Mapping[str, Any] | None]]) -> list[Score]:
        """Scores of rows (data_source, solution, ground_truth, extra_info), in their order. Waits for them all."""
        assert self._num_pending == 0, "samples of another caller are pending"
        for index, row in enumerate(rows):
            self.submit(index, *row)
        scores: dict[Hashable, Score] = {}
        # Each result takes at most one call and one start of a worker.
        limit_s = self._timeout_s + self._start_timeout_s + 5.0
        while len(scores) < len(rows):
            if not self.wait(limit_s):
                raise RunError(f"waited {limit_s:.0f} s for a score of {self._name}: {len(rows) - len(scores)} missing")
            scores.update(self.poll())
        return [scores[index] for index in range(len(rows))]

    def close(self) -> None:
        """End all workers; what is pending is dropped. Closing twice is fine."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._nudge()
        self._thread.join(_JOIN_TIMEOUT_S)
        if self._thread.is_alive():
            raise RunError(f"waited {_JOIN_TIMEOUT_S:.0f} s for the processes of {self._name} to end after SIGKILL")
        os.close(self._nudge_read)
        os.close(self._nudge_write)

    # What follows, but for the first two, runs in the pool's thread.

    def _await_start(self, num_workers: int) -> None:
        limit_s = self._start_timeout_s + 5.0
        with self._lock:
            done = self._lock.wait_for(lambda: self._num_ready >= num_workers or self._fault is not None, limit_s)
            fault = self._fault if done else f"reward.function: {self._name}: no worker was ready in {limit_s:.0f} s"
        if fault is not None:
            self.close()
            raise UserError(fault)

    def _nudge(self) -> None:
        try:
            os.write(self._nudge_write, b"x")
        except BlockingIOError:
            pass  # It is awake anyway.

    def _serve(self, num_workers: int) -> None:
        try:
            for _ in range(num_workers):
                self._start_worker()
            while not self._closing:
                self._hand_out()
                for key, _ in self._selector.select(self._seconds_to_deadline()):
                    self._on_event(key)
                self._check_deadlines()
        except BaseException as error:
            self._fail(f"reward.function: {self._name}: the pool failed: {type(error).__name__}: {error}")
            raise
        finally:
            self._end_workers()

    def _start_worker(self) -> None:
        worker = WorkerProcess(self._setup, self._start_timeout_s, self._log_file)
        self._workers.append(worker)
        self._selector.register(worker.output_fd, selectors.EVENT_READ, worker)
        self._watch_input(worker)

    def _hand_out(self) -> None:
        for worker in self._workers:
            if not worker.idle:
                continue
            with self._lock:
                if not self._queue:
                    return
                task = self._queue.popleft()
            worker.give(task, self._timeout_s)
            self._watch_input(worker)

    def _watch_input(self, worker: WorkerProcess) -> None:
        """Have the selector say when a worker's pipe takes what is still unsent."""
        watched = worker.input_fd in self._selector.get_map()
        if worker.has_unsent and not watched:
            self._selector.register(worker.input_fd, selectors.EVENT_WRITE, worker)
        elif watched and not worker.has_unsent:
            self._selector.unregister(worker.input_fd)

    def _seconds_to_deadline(self) -> float | None:
        deadlines = [worker.deadline for worker in self._workers if worker.deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _on_event(self, key: selectors.SelectorKey) -> None:
        worker = key.data
        if worker is None:
            os.read(self._nudge_read, 1 << 12)
        elif worker not in self._workers:
            return  # It was replaced by an event of the same round.
        elif key.fd == worker.input_fd:
            worker.flush()
            self._watch_input(worker)
        else:
            self._read(worker)

    def _read(self, worker: WorkerProcess) -> None:
        try:
            messages = worker.read()
        except ValueError:
            self._on_death(worker, "the reward process wrote to the pipe of its results")
            return
        if messages is None:
            self._on_death(worker, f"the reward process {worker.end_reason()}")
            return
        for message in messages:
            if not worker.ready:
                self._on_started(worker, message)
            else:
                score = Score(message["status"], message["value"], message["reason"], message["extra"])
                self._deaths_in_a_row = 0
                self._deliver(worker, score)

    def _on_started(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        if "error" in message:
            self._fail(message["error"])
            return
        worker.ready = True
        worker.deadline = None
        with self._lock:
            self._num_ready += 1
            self._lock.notify_all()

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            if worker.deadline is None or now < worker.deadline:
                continue
            if worker.ready:
                self._on_death(worker, f"timed out after {self._timeout_s:g} s")
            else:
                self._on_death(worker, f"the reward process was not ready after {self._start_timeout_s:g} s")

    def _on_death(self, worker: WorkerProcess, reason: str) -> None:
        """Replace a worker that is over or has to be; its sample is invalid for `reason`."""
        was_ready = worker.ready
        if worker.task is not None:
            self._deliver(worker, invalid(reason))
        else:
            self._deaths_in_a_row += 1
        self._remove(worker)
        if not was_ready and self._num_ready == 0:
            self._fail(f"reward.function: {self._name}: {reason} while it was imported")
        elif self._deaths_in_a_row >= _MAX_DEATHS_IN_A_ROW:
            self._fail(
                f"reward.function: {self._name}: {reason} without a sample, {self._deaths_in_a_row} times in a row"
            )
        else:
            self._start_worker()

    def _deliver(self, worker: WorkerProcess, score: Score) -> None:
        assert worker.task is not None
        with self._lock:
            self._results.append((worker.task.key, score))
            self._lock.notify_all()
        worker.task = None
        worker.deadline = None
        if self._wakeup is not None:
            self._wakeup.set()

    def _fail(self, fault: str) -> None:
        with self._lock:
            self._fault = self._fault or fault
            self._lock.notify_all()
        if self._wakeup is not None:
            self._wakeup.set()

    def _remove(self, worker: WorkerProcess) -> None:
        for descriptor in (worker.input_fd, worker.output_fd):
            if descriptor in self._selector.get_map():
                self._selector.unregister(descriptor)
        worker.kill()
        self._workers.remove(worker)

    def _end_workers(self) -> None:
        for worker in self._workers:
            if worker.input_fd in self._selector.get_map():
                self._selector.unregister(worker.input_fd)
            worker.close_input()
        deadline = time.monotonic() + _CLOSE_GRACE_S
        for worker in list(self._workers):
            if worker.task is None and worker.ready:
                worker.wait(max(0.0, deadline - time.monotonic()))
            self._remove(worker)
        self._selector.close()
