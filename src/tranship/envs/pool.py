"""Sessions of an environment, each in a process of its own that can be killed. A session that raises, hangs, exits or
fills its memory costs its own sample and nothing else."""

from __future__ import annotations

import os
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tranship.envs.answer import Answer, EnvSpec, to_answer
from tranship.envs.frames import pack
from tranship.envs.process import Session, Zygote
from tranship.ipc import Mailbox
from tranship.types import UserError

START_TIMEOUT_S = 60.0
_MAX_DEATHS_IN_A_ROW = 3
_CLOSE_GRACE_S = 5.0


class EnvPool:
    """Runs sessions of the environment `name` (an entry of the table, or module:name) made with `args`.

    num_workers: requests that are worked on at the same time; any number of sessions may be open (each is a process).
    step_timeout_s: limit of one request, from when its process starts on it. memory_bytes: limit of each session's
    address space. wakeup: set whenever an answer is there. log_file: gets what environments print, and tracebacks;
    None: this process's stderr. Raises UserError at construction where the environment cannot be made.

    Answers come in any order. A thread of the pool does the work; `open`, `step`, `end` and `poll` never wait. `close`
    leaves no process; when this process ends without it, the sessions end too. Nothing that comes from a session is
    trusted: answers are JSON, and checked.
    """

    def __init__(
        self,
        name: str,
        args: Mapping[str, Any] | None = None,
        *,
        num_workers: int = 2,
        step_timeout_s: float = 10.0,
        memory_bytes: int | None = None,
        wakeup: threading.Event | None = None,
        log_file: Path | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        assert num_workers >= 1, num_workers
        self._name = name
        self._setup = {
            "env": name,
            "args": dict(args or {}),
            "sys_path": [entry or os.getcwd() for entry in sys.path],
            "parent": os.getpid(),
            "memory_bytes": memory_bytes,
        }
        self._num_workers = num_workers
        self._timeout_s = step_timeout_s
        self._start_timeout_s = start_timeout_s
        self._log_file = log_file
        self._box: Mailbox[int, Answer] = Mailbox(wakeup)
        # Appended to by the caller, taken from by the thread.
        self._commands: deque[tuple[int, bytes | None]] = deque()
        self._num_opened = 0
        self._spec: EnvSpec | None = None
        self._sessions: dict[int, Session] = {}
        self._waiting: deque[Session] = deque()
        self._deaths_in_a_row = 0
        self._zygote: Zygote | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._box.nudge_fd, selectors.EVENT_READ)
        # The kernel ends the zygote when the thread that started it ends: this one lives as long as the pool.
        self._thread = threading.Thread(target=self._serve, name="env-pool", daemon=True)
        self._thread.start()
        limit_s = start_timeout_s + 5.0
        late = f"env.name: {name} was not made in {limit_s:.0f} s"
        fault = self._box.await_start(lambda: self._spec is not None, limit_s, late)
        if fault is not None:
            self.close()
            raise UserError(fault)

    def __enter__(self) -> EnvPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def spec(self) -> EnvSpec:
        """Tools and roles of the environment."""
        assert self._spec is not None
        return self._spec

    @property
    def num_pending(self) -> int:
        """Requests whose answer `poll` has not returned yet (those of ended sessions included until it is known)."""
        return self._box.num_pending

    def open(self, prompt_info: Mapping[str, Any], seed: int) -> int:
        """Begin a session and reset it; returns its number, under which `poll` answers. prompt_info: JSON values."""
        self._num_opened += 1
        self._command(self._num_opened, pack({"reset": dict(prompt_info), "seed": seed}))
        return self._num_opened

    def step(self, session: int, message: Mapping[str, Any]) -> None:
        """Give a session a turn of the model (role, content, finish_reason); its last request must be answered."""
        self._command(session, pack({"step": dict(message)}))

    def end(self, session: int) -> None:
        """Kill a session; a request that it still has is not answered. Ending twice is fine."""
        self._command(session, None)

    def poll(self) -> list[tuple[int, Answer]]:
        """The answers that came since the last call. Raises RunError if no session can be started any more."""
        return self._box.poll()

    def wait(self, timeout_s: float) -> bool:
        """Wait until `poll` has something to return or to raise, at most so long; says whether it has."""
        return self._box.wait(timeout_s)

    def close(self) -> None:
        """End all sessions; what is pending is dropped. Closing twice is fine."""
        self._box.close(self._thread, f"the sessions of {self._name}")

    def _command(self, session: int, request: bytes | None) -> None:
        self._box.expect(int(request is not None))
        self._commands.append((session, request))
        self._box.nudge()

    # What follows runs in the pool's thread.

    def _serve(self) -> None:
        try:
            self._start_zygote()
            while not self._box.closing and self._box.fault is None:
                self._take_commands()
                self._hand_out()
                for key, events in self._selector.select(self._seconds_to_deadline()):
                    self._on_event(key, events)
                self._check_deadlines()
        except BaseException as error:
            self._box.fail(f"env.name: {self._name}: the pool failed: {type(error).__name__}: {error}")
            raise
        finally:
            for session in self._sessions.values():
                self._close_socket(session)
            if self._zygote is not None:
                self._zygote.close(_CLOSE_GRACE_S)
            self._selector.close()

    def _start_zygote(self) -> None:
        self._zygote = Zygote(self._setup, self._start_timeout_s, self._log_file)
        self._selector.register(self._zygote.control, selectors.EVENT_READ)

    def _take_commands(self) -> None:
        while self._commands:
            number, request = self._commands.popleft()
            if request is None:
                self._end(number)
                continue
            session = self._sessions.setdefault(number, Session(number))
            assert session.request is None, f"session {number} has a request already"
            assert session.deadline is None, f"session {number} is at work already"
            session.request = request
            if session.fault is not None:
                self._deliver(session, Answer(error=session.fault))
            else:
                self._waiting.append(session)

    def _hand_out(self) -> None:
        assert self._zygote is not None
        num_running = sum(session.deadline is not None for session in self._sessions.values())
        while self._waiting and num_running < self._num_workers and self._zygote.description is not None:
            session = self._waiting.popleft()
            if session.ending:
                continue
            if session.socket is None:
                try:
                    session.socket = self._zygote.fork(session.number)
                except OSError:
                    self._waiting.appendleft(session)
                    return  # The zygote is over, and its socket says so at the next select.
                self._selector.register(session.socket, selectors.EVENT_READ, session)
            session.start(self._timeout_s)
            self._watch(session)
            num_running += 1

    def _watch(self, session: Session) -> None:
        """Have the selector say when a session answers, and when its socket takes what is still unsent."""
        if session.socket is not None:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if session.has_unsent else 0)
            self._selector.modify(session.socket, events, session)

    def _seconds_to_deadline(self) -> float | None:
        deadlines = [session.deadline for session in self._sessions.values() if session.deadline is not None]
        if self._zygote is not None and self._zygote.deadline is not None:
            deadlines.append(self._zygote.deadline)
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _on_event(self, key: selectors.SelectorKey, events: int) -> None:
        assert self._zygote is not None
        if key.fileobj == self._box.nudge_fd:
            self._box.drain()
        elif key.fileobj is self._zygote.control:
            self._read_zygote(self._zygote)
        elif isinstance(key.data, Session) and key.data.socket is key.fileobj:
            if events & selectors.EVENT_WRITE:
                key.data.flush()
                self._watch(key.data)
            if events & selectors.EVENT_READ:
                self._read(key.data)

    def _read(self, session: Session) -> None:
        try:
            messages = session.read()
        except ValueError:
            self._break(session, "the session wrote something else than an answer")
            return
        if messages is None:
            session.ending = True
            self._close_socket(session)
            self._tell_zygote_to_end(session)  # Its answer says how the process ended.
            return
        for message in messages:
            if session.deadline is None:
                self._break(session, "the session answered without a request")
                return
            self._deaths_in_a_row = 0
            answer = to_answer(message, time.monotonic() - session.started)
            self._deliver(session, answer)
            if answer.error is not None:
                self._break(session, answer.error)
                return

    def _read_zygote(self, zygote: Zygote) -> None:
        messages = zygote.read()
        if messages is None:
            self._on_zygote_death("the process that starts the sessions ended")
            return
        for message in messages:
            if zygote.description is None:
                self._on_made(zygote, message)
            elif (session := self._sessions.get(message["ended"])) is not None:
                self._break(session, f"the session's process {message['how']}", known=True)

    def _on_made(self, zygote: Zygote, message: dict[str, Any]) -> None:
        if "error" in message:
            self._box.fail(message["error"])
            return
        zygote.description, zygote.deadline = message, None
        self._spec = EnvSpec(tuple(message["tools"]), tuple(message["roles"]))
        self._box.say_ready()

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for session in list(self._sessions.values()):
            if session.deadline is not None and now >= session.deadline:
                self._break(session, f"timed out after {self._timeout_s:g} s")
        assert self._zygote is not None
        if self._zygote.deadline is not None and now >= self._zygote.deadline:
            self._box.fail(f"env.name: {self._name} was not made in {self._start_timeout_s:g} s")
            self._zygote.deadline = None

    def _break(self, session: Session, reason: str, known: bool = False) -> None:
        """A session cannot go on: end its process (unless that is known to be over), and answer with the reason."""
        first = session.fault is None
        session.fault = session.fault or reason
        had_socket = session.socket is not None
        self._close_socket(session)
        if had_socket and not known:
            self._tell_zygote_to_end(session)
        if session in self._waiting:
            self._waiting.remove(session)
        if first and (session.deadline is not None or session.request is not None):
            seconds = 0.0 if session.deadline is None else time.monotonic() - session.started
            self._deliver(session, Answer(error=reason, seconds=seconds))

    def _end(self, number: int) -> None:
        session = self._sessions.pop(number, None)
        if session is None:
            return
        unanswered = session.request is not None or session.deadline is not None
        if session in self._waiting:
            self._waiting.remove(session)
        self._box.expect(-int(unanswered))
        if session.socket is not None:
            self._close_socket(session)
            self._tell_zygote_to_end(session)

    def _tell_zygote_to_end(self, session: Session) -> None:
        assert self._zygote is not None
        try:
            self._zygote.end(session.number)
        except OSError:
            pass  # The zygote is over, and the session with it; its socket says so at the next select.

    def _close_socket(self, session: Session) -> None:
        if session.socket is not None:
            self._selector.unregister(session.socket)
            session.socket.close()
            session.socket = None

    def _on_zygote_death(self, reason: str) -> None:
        """All sessions are over with it; others can start from a new one, a few times in a row."""
        assert self._zygote is not None
        was_made = self._zygote.description is not None
        self._selector.unregister(self._zygote.control)
        self._zygote.close(_CLOSE_GRACE_S)
        self._deaths_in_a_row += 1
        for session in list(self._sessions.values()):
            if session.socket is not None or session.deadline is not None or session.ending:
                self._break(session, reason, known=True)
        if not was_made:
            self._box.fail(f"env.name: {self._name}: its process ended while it was made")
        elif self._deaths_in_a_row >= _MAX_DEATHS_IN_A_ROW:
            self._box.fail(f"env.name: {self._name}: {reason}, {self._deaths_in_a_row} times in a row")
        if self._box.fault is None:
            self._start_zygote()

    def _deliver(self, session: Session, answer: Answer) -> None:
        session.request = None
        session.deadline = None
        self._box.deliver(session.number, answer)


def describe_env(name: str, args: Mapping[str, Any] | None = None) -> EnvSpec:
    """Tools and roles of an environment, which is made in a process that ends at once. UserError where it cannot be."""
    with EnvPool(name, args) as pool:
        return pool.spec
