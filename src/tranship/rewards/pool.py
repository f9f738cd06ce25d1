"""Processes that run the functions of a reward, each call within a limit. A call that raises, hangs or ends its process
costs its own sample and nothing else."""

from __future__ import annotations

import math
import os
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tranship.ipc import Mailbox, pack
from tranship.rewards.log import Log
from tranship.rewards.process import Running, Task, WorkerProcess
from tranship.rewards.request import RewardRequest
from tranship.rewards.scoring import from_message, invalid
from tranship.rewards.terms import Term
from tranship.types import RunError, Score, UserError

START_TIMEOUT_S = 60.0
_MAX_DEATHS_IN_A_ROW = 3
_CLOSE_GRACE_S = 0.5
# How much later than a worker's event loop the pool gives up on a call: the loop does it first unless it is stuck.
_LOOP_GRACE_S = 1.0
_FORGED = "the reward process wrote to the pipe of its results"


class RewardPool:
    """Scores samples with the functions of `terms`, one after another, in `num_workers` processes of its own.

    timeout_s: limit of one call, from when a worker starts on it. concurrency: rows in flight in each process if one of
    the functions is asynchronous; else a process works on one row. wakeup: set whenever a result is there.
    memory_bytes: limit of each process's address space. log_file: gets what the functions print and the first
    tracebacks of each process, at most 10 MB; None: this process's stderr, without a limit.
    Raises UserError at construction where a function does not import or cannot be called.

    A call over its limit is cut off: an asynchronous one alone, else the process is killed and replaced; the sample is
    invalid. Where several samples were in flight in a process that ended, each is tried once more, in a process that
    has no other meanwhile, so that the one at fault is known and the rest are scored. Results come in any order. A
    thread of the pool starts, feeds and ends the processes; `submit` and `poll` never wait. `close` leaves no process;
    when this process ends without it, the workers end too.
    """

    def __init__(
        self,
        terms: Sequence[Term],
        num_workers: int = 1,
        timeout_s: float = 10.0,
        *,
        concurrency: int = 32,
        wakeup: threading.Event | None = None,
        memory_bytes: int | None = None,
        log_file: Path | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        assert num_workers >= 1, num_workers
        assert terms, "nothing to run"
        self._terms = tuple(terms)
        self._name = ", ".join(term.name for term in terms)
        self._setup = {
            "terms": [term.to_message() for term in terms],
            "sys_path": [entry or os.getcwd() for entry in sys.path],
            "parent": os.getpid(),
            "memory_bytes": memory_bytes,
            "timeout_s": timeout_s,
            "concurrency": concurrency,
        }
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._log = Log(log_file) if log_file else None
        self._box: Mailbox[Hashable, Score] = Mailbox(wakeup)
        # Appended to by the caller, taken from by the thread.
        self._queue: deque[Task] = deque()
        self._num_submitted = 0
        self._num_ready = 0
        self._workers: list[WorkerProcess] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._box.nudge_fd, selectors.EVENT_READ, None)
        self._deaths_in_a_row = 0
        # The kernel ends a worker when the thread that started it ends, so one thread does that as long as the pool is.
        self._thread = threading.Thread(target=self._serve, args=(num_workers,), name="reward-pool", daemon=True)
        self._thread.start()
        limit_s = start_timeout_s + 5.0
        late = f"{self._setting}: no worker was ready in {limit_s:.0f} s"
        fault = self._box.await_start(lambda: self._num_ready >= num_workers, limit_s, late)
        if fault is not None:
            self.close()
            raise UserError(fault)

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def num_pending(self) -> int:
        """Samples submitted whose score `poll` has not returned yet."""
        return self._box.num_pending

    def submit(self, key: Hashable, request: RewardRequest) -> None:
        """Queue a sample; `poll` returns its score under `key`."""
        self._num_submitted += 1
        frame = pack({"id": self._num_submitted, "row": request.to_row()})
        self._box.expect()
        self._queue.append(Task(key, self._num_submitted, frame))
        self._box.nudge()

    def poll(self) -> list[tuple[Hashable, Score]]:
        """The scores that have come since the last call. Raises RunError if no worker can be started any more."""
        return self._box.poll()

    def wait(self, timeout_s: float) -> bool:
        """Wait until `poll` has something to return or to raise, at most so long; says whether it has."""
        return self._box.wait(timeout_s)

    def score_all(self, requests: Sequence[RewardRequest]) -> list[Score]:
        """Scores of requests, in their order. Waits for them all."""
        assert self.num_pending == 0, "samples of another caller are pending"
        for index, request in enumerate(requests):
            self.submit(index, request)
        scores: dict[Hashable, Score] = {}
        # A result takes at most one call of each term, twice where others were in flight, and two starts of a worker.
        limit_s = 2 * (len(self._terms) * (self._timeout_s + _LOOP_GRACE_S) + self._start_timeout_s) + 5.0
        while len(scores) < len(requests):
            if not self.wait(limit_s):
                missing = len(requests) - len(scores)
                raise RunError(f"waited {limit_s:.0f} s for a score of {self._name}: {missing} missing")
            scores.update(self.poll())
        return [scores[index] for index in range(len(requests))]

    def close(self) -> None:
        """End all workers; what is pending is dropped. Closing twice is fine."""
        if self._box.close(self._thread, f"the processes of {self._name}") and self._log is not None:
            self._log.close()

    # What follows runs in the pool's thread.

    def _serve(self, num_workers: int) -> None:
        try:
            for _ in range(num_workers):
                self._start_worker()
            while not self._box.closing:
                self._hand_out()
                for key, _ in self._selector.select(self._seconds_to_deadline()):
                    self._on_event(key)
                self._check_deadlines()
        except BaseException as error:
            self._box.fail(f"{self._setting}: the pool failed: {type(error).__name__}: {error}")
            raise
        finally:
            self._end_workers()

    def _start_worker(self) -> None:
        worker = WorkerProcess(self._setup, self._start_timeout_s, self._log)
        self._workers.append(worker)
        self._selector.register(worker.output_fd, selectors.EVENT_READ, worker)
        if worker.printed_fd is not None:
            self._selector.register(worker.printed_fd, selectors.EVENT_READ, worker)
        self._watch_input(worker)

    def _hand_out(self) -> None:
        while True:
            if not self._queue:
                return
            task = self._queue[0]
            free = [worker for worker in self._workers if worker.takes(task)]
            if not free:
                return
            self._queue.popleft()
            worker = min(free, key=lambda worker: len(worker.running))
            worker.give(task, self._limit_s(worker))
            self._watch_input(worker)

    def _limit_s(self, worker: WorkerProcess) -> float:
        return self._timeout_s + (_LOOP_GRACE_S if worker.in_flight > 1 else 0.0)

    def _watch_input(self, worker: WorkerProcess) -> None:
        """Have the selector say when a worker's pipe takes what is still unsent."""
        watched = worker.input_fd in self._selector.get_map()
        if worker.has_unsent and not watched:
            self._selector.register(worker.input_fd, selectors.EVENT_WRITE, worker)
        elif watched and not worker.has_unsent:
            self._selector.unregister(worker.input_fd)

    def _seconds_to_deadline(self) -> float | None:
        deadlines = [worker.deadline for worker in self._workers if worker.deadline is not None]
        first = min(deadlines, default=math.inf)
        return max(0.0, first - time.monotonic()) if first < math.inf else None

    def _on_event(self, key: selectors.SelectorKey) -> None:
        worker = key.data
        if worker is None:
            self._box.drain()
        elif worker not in self._workers:
            return  # It was replaced by an event of the same round.
        elif key.fd == worker.input_fd:
            worker.flush()
            self._watch_input(worker)
        elif key.fd == worker.printed_fd:
            if not worker.read_printed():
                self._selector.unregister(key.fd)
        else:
            self._read(worker)

    def _read(self, worker: WorkerProcess) -> None:
        try:
            messages = worker.read()
        except ValueError:
            self._on_death(worker, _FORGED)
            return
        if messages is None:
            reason = f"the reward process {worker.end_reason()}"
            self._on_death(worker, reason, from_outside=worker.was_killed())
            return
        for message in messages:
            if not worker.ready:
                self._on_started(worker, message)
                continue
            running = worker.running.get(message["id"])
            if running is None:
                self._on_death(worker, _FORGED)
                return
            if "at" in message:
                running.move(message["at"], self._limit_s(worker))
            else:
                self._deaths_in_a_row = 0
                self._deliver(worker, running, from_message(message))

    def _on_started(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        if "error" in message:
            self._box.fail(message["error"])
            return
        worker.ready = True
        worker.in_flight = message["in_flight"]
        worker.start_deadline = None
        self._num_ready += 1
        self._box.say_ready()

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            if worker.deadline is None or now < worker.deadline:
                continue
            if worker.ready:
                self._on_death(worker, f"timed out after {self._timeout_s:g} s")
            else:
                self._on_death(worker, f"the reward process was not ready after {self._start_timeout_s:g} s")

    def _on_death(self, worker: WorkerProcess, reason: str, *, from_outside: bool = False) -> None:
        """Replace a worker that is over or has to be. Its sample is invalid for `reason`; several are tried alone, and
        so is one whose process somebody else has killed: that says nothing of the sample, unless it happens again."""
        was_ready = worker.ready
        running = list(worker.running.values())
        if not running:
            self._deaths_in_a_row += 1
        elif len(running) == 1 and (running[0].task.alone or not from_outside):
            at = self._terms[running[0].term].name
            said = reason if len(self._terms) == 1 else f"{at}: {reason}"
            self._deliver(worker, running[0], invalid(said))
        else:
            self._queue.extendleft(replace(entry.task, alone=True) for entry in reversed(running))
        self._remove(worker)
        if not was_ready and self._num_ready == 0:
            self._box.fail(f"{self._setting}: {reason} while it was imported")
        elif self._deaths_in_a_row >= _MAX_DEATHS_IN_A_ROW:
            self._box.fail(f"{self._setting}: {reason} without a sample, {self._deaths_in_a_row} times in a row")
        else:
            self._start_worker()

    def _deliver(self, worker: WorkerProcess, running: Running, score: Score) -> None:
        del worker.running[running.task.number]
        self._box.deliver(running.task.key, score)

    @property
    def _setting(self) -> str:
        return f"{self._terms[0].setting}: {self._name}"

    def _remove(self, worker: WorkerProcess) -> None:
        for descriptor in (worker.input_fd, worker.output_fd, worker.printed_fd):
            if descriptor is not None and descriptor in self._selector.get_map():
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
            if not worker.running and worker.ready:
                worker.wait(max(0.0, deadline - time.monotonic()))
            self._remove(worker)
        self._selector.close()
