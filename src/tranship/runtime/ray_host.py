"""The inside of a Ray process: hosts one object and carries calls, events and wake-ups between it and the others.

Runs in the hosted process. Must not import torch: the environment that it reads when it is loaded is set here first.
What methods raise is returned as data, since an exception must reach the caller with its type, and Ray would wrap it.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray

from tranship.lookup import resolve
from tranship.runtime.base import Context, plain_event
from tranship.runtime.ray_objects import RayObjects
from tranship.types import RunError

_PR_SET_PDEATHSIG = 1
_SIG_IGN = 1
_IDLE_S = 1.0


@dataclass(frozen=True)
class Surroundings:
    """What a hosted process must be like before anything is loaded into it. environment: None takes a name out."""

    environment: dict[str, str | None]
    folder: str | None
    import_paths: tuple[str, ...]


@dataclass(frozen=True)
class Recipe:
    """How to build the hosted object."""

    name: str
    factory: str
    kwargs: dict[str, Any]
    num_threads: int | None


@dataclass(frozen=True)
class Failure:
    """An exception on its way to another process: pickled (b"" where it cannot be), in words, and its traceback."""

    pickled: bytes
    summary: str
    trace: str

    @classmethod
    def of(cls, error: BaseException, name: str) -> Failure:
        """`error` as raised in process `name`. What is no Exception (SystemExit) would end the caller: words go."""
        try:
            pickled = pickle.dumps(error) if isinstance(error, Exception) else b""
        except Exception:
            pickled = b""
        summary = f"{type(error).__name__} in process {name!r}: {error}"
        trace = "".join(traceback.format_exception(error)).rstrip()
        return cls(pickled, summary, f"raised in process {name!r} (pid {os.getpid()}):\n{trace}")

    def exception(self) -> Exception:
        """The exception with its type, or a RunError that quotes it; the traceback is its note."""
        try:
            error: Exception = pickle.loads(self.pickled)
        except Exception:
            error = RunError(self.summary)
        error.add_note(self.trace)
        return error


@dataclass(frozen=True)
class Reply:
    """The outcome of a call: a value, or a failure."""

    value: Any = None
    failure: Failure | None = None


@dataclass(frozen=True)
class News:
    """What a process has to say: events since the last time, and what ended its loop, if something did."""

    events: tuple[dict[str, Any], ...]
    failure: Failure | None


def attempt(run: Callable[[], Any], name: str) -> Reply:
    """The outcome of `run` as data. Whatever it raises becomes data too, or the thread that serves calls would end."""
    try:
        return Reply(run())
    except BaseException as error:
        return Reply(failure=Failure.of(error, name))


def settle_in(surroundings: Surroundings) -> None:
    """Prepare this process: environment, folder, import paths; it dies with its parent, and ignores Ctrl-C."""
    for name, value in surroundings.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if surroundings.folder is not None and os.path.isdir(surroundings.folder):
        os.chdir(surroundings.folder)
    sys.path.extend(path for path in surroundings.import_paths if path not in sys.path)
    libc = ctypes.CDLL(None)
    if sys.platform == "linux":
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Of the whole process: there are threads already, and any of them may be the one that a signal comes to. Python's
    # own function is for the main thread alone.
    libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    libc.signal(signal.SIGINT, _SIG_IGN)


def limit_threads(num_threads: int | None) -> None:
    """Give torch its number of threads, if the hosted object brought torch along."""
    torch = sys.modules.get("torch")
    if num_threads is not None and torch is not None:
        torch.set_num_threads(num_threads)


class _Mailbox:
    """Events on their way from the hosted object (any thread) to the driver's long poll (the event loop)."""

    def __init__(self) -> None:
        self._events: deque[dict[str, Any]] = deque()
        self._failure: Failure | None = None
        self._bell = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def emit(self, event: dict[str, Any]) -> None:
        self._events.append(plain_event(event))
        self._loop.call_soon_threadsafe(self._bell.set)

    def fail(self, failure: Failure) -> None:
        self._failure = failure
        self._loop.call_soon_threadsafe(self._bell.set)

    async def news(self, timeout_s: float) -> News:
        try:
            await asyncio.wait_for(self._bell.wait(), timeout_s)
        except TimeoutError:
            pass
        self._bell.clear()
        failure, self._failure = self._failure, None
        events = []
        while self._events:
            events.append(self._events.popleft())
        return News(tuple(events), failure)


class _Host:
    """What both kinds share: the mailbox, and the first and the last words."""

    def __init__(self, surroundings: Surroundings) -> None:
        settle_in(surroundings)
        self._name = ""
        self._hosted: Any = None
        self._mailbox: _Mailbox | None = None

    def _box(self) -> _Mailbox:
        if self._mailbox is None:
            self._mailbox = _Mailbox()
        return self._mailbox

    def _build(self, recipe: Recipe, wakeup: threading.Event, box: _Mailbox) -> None:
        node, host = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        context = Context(recipe.name, wakeup, box.emit, RayObjects(), node, host)
        self._hosted = resolve(recipe.factory, {}, f"process {recipe.name!r}")(**recipe.kwargs, context=context)
        limit_threads(recipe.num_threads)

    async def hello(self) -> int:
        """The process's id."""
        return os.getpid()

    async def news(self, timeout_s: float) -> News:
        """Events, as soon as there are some; none after timeout_s, which tells that the process answers."""
        return await self._box().news(timeout_s)


class ServiceHost(_Host):
    """Hosts a service: its methods run on the event loop, one after the other."""

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        self._ready = asyncio.Event()
        self._built = Reply()

    async def host(self, recipe: Recipe) -> Reply:
        """Build the object."""
        self._name = recipe.name
        self._built = attempt(lambda: self._build(recipe, threading.Event(), self._box()), recipe.name)
        self._ready.set()
        return self._built

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reply:
        """Run a method, once the object is built."""
        await self._ready.wait()
        if self._built.failure is not None:
            return self._built
        return attempt(lambda: getattr(self._hosted, method)(*args, **kwargs), self._name)

    async def stop(self) -> Reply:
        """Close the object."""
        return attempt(getattr(self._hosted, "close", lambda: None), self._name)


class LoopHost(_Host):
    """Hosts a loop: one thread builds the object, gives it passes, runs calls between them, and closes it."""

    def __init__(self, surroundings: Surroundings) -> None:
        super().__init__(surroundings)
        self._calls: deque[tuple[Callable[[], Any], Future[Reply]]] = deque()
        self._wakeup = threading.Event()
        self._stopping = threading.Event()
        self._closed: Future[Reply] = Future()
        self._ended: Failure | None = None

    async def host(self, recipe: Recipe) -> Reply:
        """Start the thread; the outcome of building the object."""
        self._name = recipe.name
        built: Future[Reply] = Future()
        arguments = (recipe, built, self._box())
        threading.Thread(target=self._run, args=arguments, name=f"loop-{recipe.name}", daemon=True).start()
        return await asyncio.wrap_future(built)

    def _run(self, recipe: Recipe, built: Future[Reply], box: _Mailbox) -> None:
        reply = attempt(lambda: self._build(recipe, self._wakeup, box), recipe.name)
        self._ended = reply.failure
        built.set_result(reply)
        while self._ended is None:
            self._wakeup.clear()
            self._run_calls()
            if self._stopping.is_set():
                self._ended = Failure.of(RunError(f"process {self._name!r} was stopped"), self._name)
                break
            reply = attempt(self._hosted.poll, self._name)
            if reply.failure is not None:
                self._ended = reply.failure
                box.fail(reply.failure)
            elif not reply.value:
                self._wakeup.wait(_IDLE_S)
        self._run_calls()
        self._closed.set_result(attempt(getattr(self._hosted, "close", lambda: None), self._name))

    def _run_calls(self) -> None:
        while True:
            try:
                run, future = self._calls.popleft()
            except IndexError:
                return
            future.set_result(attempt(run, self._name) if self._ended is None else Reply(failure=self._ended))

    async def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reply:
        """Run a method between two passes."""
        future: Future[Reply] = Future()
        self._calls.append((lambda: getattr(self._hosted, method)(*args, **kwargs), future))
        self._wakeup.set()
        if self._ended is not None:
            self._run_calls()
        return await asyncio.wrap_future(future)

    async def stop(self) -> Reply:
        """Let the current pass end, then close the object."""
        self._stopping.set()
        self._wakeup.set()
        return await asyncio.wrap_future(self._closed)
