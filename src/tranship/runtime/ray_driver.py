"""The runtime of many processes: each hosted object is a Ray actor, on this node or on others."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tranship.runtime.base import CallTimeout, Handle, Kind, ProcessDied, RuntimeOptions, ServiceProxy
from tranship.runtime.device import resolve_device
from tranship.runtime.processes import end_all, is_running, is_stopped
from tranship.runtime.ray_cluster import Cluster
from tranship.runtime.ray_host import LoopHost, News, Recipe, ServiceHost, Surroundings
from tranship.runtime.ray_objects import RayObjects
from tranship.runtime.ray_proxy import RayServiceProxy, describe_death, open_reply
from tranship.types import RunError

# A process answers the driver at least every _PARK_S; a stopped one is given up after _STOPPED_S, a silent one (its
# interpreter is held by something that never lets go) after _SILENT_S.
_PARK_S = 2.0
_STOPPED_S = 6.0
_SILENT_S = 120.0
_HELLO_S = 60.0
# Whoever waits for an answer looks so often whether the process that owes it is still there.
_LOOK_S = 1.0
_CLOSE_S = 5.0
_GRACE_S = 1.0


def thread_environment(num_threads: int | None) -> dict[str, str | None]:
    """Environment variables that give numerical libraries their threads, and let idle threads sleep.

    Threads that spin while they wait take the cores of the processes beside them. Without a number, the libraries
    decide as they would in the driver (Ray's own choice, one thread, is taken back).
    """
    environment: dict[str, str | None] = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"):
        environment[name] = os.environ.get(name) if num_threads is None else str(num_threads)
    return environment


class RayPending:
    """A call under way in another process."""

    def __init__(self, process: RayHandle, method: str, ref: Any) -> None:
        self._process = process
        self._method = method
        self._ref = ref

    def done(self) -> bool:
        """Whether the outcome has arrived."""
        return bool(ray.wait([self._ref], timeout=0)[0])

    def result(self, timeout_s: float) -> Any:
        """What the method returned or raised; what has died meanwhile is told by the runtime's next `poll`."""
        left_s = self._process.wait_for(self._ref, timeout_s)
        try:
            return open_reply(self._ref, self._process.name, self._process.known_pid, self._method, left_s, timeout_s)
        except ProcessDied as error:
            raise self._process.explain(error) from error.__cause__


class RayHandle:
    """A hosted object in another process."""

    def __init__(self, name: str, kind: Kind, actor: Any, recipe: Recipe, runtime: RayRuntime) -> None:
        self.name = name
        self.kind: Kind = kind
        self.actor = actor
        self.known_pid: int = 0
        self.gone = False
        self.death: ProcessDied | None = None
        self._runtime = runtime
        self._hello = actor.hello.remote()
        self._built = actor.host.remote(recipe)
        self.listen()

    def listen(self) -> None:
        """Ask for the next news."""
        self.asked_at = time.monotonic()
        self.news = self.actor.news.remote(_PARK_S)

    @property
    def pid(self) -> int:
        """The process that hosts the object; waits for its start."""
        if not self.known_pid:
            try:
                self._learn_pid(_HELLO_S)
            except GetTimeoutError as error:
                raise CallTimeout(f"process {self.name!r} did not start within {_HELLO_S:g} s") from error
            except RayActorError as error:
                raise ProcessDied(f"process {self.name!r} died: {describe_death(error)}", self.name) from error
        return self.known_pid

    def _learn_pid(self, timeout_s: float) -> None:
        pid: Any = ray.get(self._hello, timeout=timeout_s)
        self.known_pid = pid
        self._runtime.cluster.watch_over_all()

    def note_pid(self) -> None:
        """Learn the process id if that takes no wait."""
        if not self.known_pid and ray.wait([self._hello], timeout=0)[0]:
            try:
                self._learn_pid(0)
            except RayActorError:
                return

    def wait_ready(self, timeout_s: float) -> None:
        """Return once the object has been built."""
        RayPending(self, "start", self._built).result(timeout_s)
        self.note_pid()

    def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """Run a method there and return its result."""
        return self.submit(method, *args, **kwargs).result(timeout_s)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> RayPending:
        """Start a method there."""
        self.note_pid()
        return RayPending(self, method, self.actor.call.remote(method, args, kwargs))

    def alive(self) -> bool:
        """Whether nothing speaks against it."""
        self.note_pid()
        local = self._runtime.cluster.owned and self.known_pid
        return not self.gone and not (local and not is_running(self.known_pid))

    def wait_for(self, ref: Any, timeout_s: float) -> float:
        """Wait for an answer of this process, at most for timeout_s, and notice meanwhile whether it is still there.

        Returns what is left of the time. A process that is held or silent is ended, and its answers fail at once.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            if ray.wait([ref], timeout=max(0.0, min(_LOOK_S, left_s)))[0] or left_s <= 0:
                return max(0.0, left_s)
            self._runtime.hear(0.0)

    def explain(self, error: ProcessDied) -> ProcessDied:
        """The known cause of this process's death, else the same error with the end of what it printed as a note."""
        if self.death is not None:
            return self.death
        if words := self._runtime.cluster.last_words(self.known_pid):
            error.add_note(f"last output of process {self.name!r}:\n{words}")
        return error

    def stop(self, timeout_s: float = _CLOSE_S) -> None:
        """Close the object and end the process."""
        if not self.gone:
            ray.wait([self.actor.stop.remote()], timeout=timeout_s)
        self.kill()
        self._runtime.forget(self)
        if self._runtime.cluster.owned and self.known_pid:
            end_all([self.known_pid], _GRACE_S)

    def kill(self) -> None:
        """End the process at once, without a word."""
        self.note_pid()
        self.gone = True
        ray.kill(self.actor)


class RayRuntime:
    """Hosts every object in a Ray process of its own. The driver waits for their news; their deaths are news too."""

    def __init__(self, options: RuntimeOptions) -> None:
        self.cluster = Cluster(options)
        self.objects = RayObjects()
        self._handles: dict[str, RayHandle] = {}
        self._events: deque[tuple[str, dict[str, Any]]] = deque()
        self._errors: deque[tuple[RayHandle, Exception]] = deque()
        self._open = True

    def start(
        self,
        name: str,
        factory: str,
        kwargs: dict[str, Any],
        *,
        kind: Kind,
        num_threads: int | None = None,
        num_accelerators: float = 0,
        node: str | None = None,
    ) -> Handle:
        """Start a process that builds the object; returns while it does.

        node: None: in a cluster of several a service is placed on the driver's, and loops are spread over all of them.
        """
        if name in self._handles:
            raise RunError(f"a process called {name!r} is already running: stop it first")
        own = self.cluster.owned
        folder = os.getcwd() if own else None
        surroundings = Surroundings(thread_environment(num_threads), folder, tuple(path for path in sys.path if path))
        # On a node of our own the cores were shared out by the caller; on a cluster Ray has to find them.
        host = ray.remote(ServiceHost if kind == "service" else LoopHost)
        actor = host.options(
            name=f"{name}-{os.getpid()}",
            num_cpus=0 if own or kind == "service" else num_threads or 1,
            max_concurrency=1000,
            max_restarts=0,
            max_task_retries=0,
            **({} if own else {"scheduling_strategy": _place(kind, node)}),
            **_accelerators(num_accelerators),
        ).remote(surroundings)
        handle = RayHandle(name, kind, actor, Recipe(name, factory, kwargs, num_threads), self)
        self._handles[name] = handle
        return handle

    def nodes(self) -> list[str]:
        """Ray's names of the nodes that live."""
        own = ray.get_runtime_context().get_node_id()
        return [own, *(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeID"] != own)]

    def service_proxy(self, name: str) -> ServiceProxy:
        """A proxy that can be sent to other processes."""
        handle = self._handles.get(name)
        if handle is None or handle.kind != "service":
            raise RunError(f"there is no running service called {name!r}")
        return RayServiceProxy(name, handle.pid, handle.actor)

    def poll(self, timeout_s: float) -> bool:
        """Wait for events. Raises what ended a loop, and ProcessDied."""
        deadline = time.monotonic() + timeout_s
        while True:
            wait_s = 0.0 if self._errors else min(1.0, max(0.0, deadline - time.monotonic()))
            self.hear(wait_s)
            if self._errors:
                raise self._errors.popleft()[1]
            if self._events:
                return True
            if time.monotonic() >= deadline:
                return False

    def hear(self, timeout_s: float) -> None:
        """Take in the news that have arrived; wait for the first of them. Errors among them are kept for `poll`."""
        waiting = {handle.news: handle for handle in self._handles.values() if not handle.gone}
        if not waiting:
            time.sleep(timeout_s)
            return
        ready, _ = ray.wait(list(waiting), num_returns=1, timeout=timeout_s)
        if ready:
            ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
        for ref in ready:
            self._take(waiting[ref])
        for handle in waiting.values():
            self._check_silence(handle)

    def _take(self, handle: RayHandle) -> None:
        try:
            received: Any = ray.get(handle.news)
        except RayActorError as error:
            self._bury(handle, f"died: {describe_death(error)}", error)
            return
        news: News = received
        handle.note_pid()
        self._events.extend((handle.name, event) for event in news.events)
        handle.listen()
        if news.failure is not None:
            self._errors.append((handle, news.failure.exception()))

    def _bury(self, handle: RayHandle, cause: str, error: Exception | None = None) -> None:
        handle.note_pid()
        handle.gone = True
        death = ProcessDied(f"process {handle.name!r} (pid {handle.known_pid}) {cause}", handle.name, handle.known_pid)
        death.__cause__ = error
        handle.death = handle.explain(death)
        self._errors.append((handle, handle.death))

    def _check_silence(self, handle: RayHandle) -> None:
        silence_s = time.monotonic() - handle.asked_at
        if handle.gone or silence_s < _STOPPED_S or not handle.known_pid or ray.wait([handle.news], timeout=0)[0]:
            return
        if self.cluster.owned and is_stopped(handle.known_pid):
            cause = "is stopped (SIGSTOP)"
        elif silence_s > _SILENT_S:
            cause = f"has not answered for {silence_s:.0f} s"
        else:
            return
        handle.kill()
        if self.cluster.owned:
            end_all([handle.known_pid], grace_s=0.0)
        self._bury(handle, f"{cause}; it was ended")

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """What was emitted since the last call."""
        drained = []
        while self._events:
            drained.append(self._events.popleft())
        return drained

    def forget(self, handle: RayHandle) -> None:
        """Free the name of a handle that was stopped; what went wrong in it is no news any more."""
        self._errors = deque(entry for entry in self._errors if entry[0] is not handle)
        if self._handles.get(handle.name) is handle:
            del self._handles[handle.name]

    def shutdown(self) -> None:
        """Close every object, loops before services, and end all processes."""
        if not self._open:
            return
        self._open = False
        handles = list(self._handles.values())
        for kind in ("loop", "service"):
            closing = [handle.actor.stop.remote() for handle in handles if handle.kind == kind and not handle.gone]
            if closing:
                ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_S / 2)
        for handle in handles:
            handle.kill()
            self.forget(handle)
        self.cluster.disconnect()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def _place(kind: Kind, node: str | None) -> Any:
    """Where Ray puts a process: a service beside the driver, which talks to it most; loops spread over the nodes."""
    if node is None and kind == "loop":
        return "SPREAD"
    return NodeAffinitySchedulingStrategy(node or ray.get_runtime_context().get_node_id(), soft=False)


def _accelerators(count: float) -> dict[str, Any]:
    """Ray's words for so many devices of the kind that this machine has."""
    if not count:
        return {}
    return {"resources": {"NPU": count}} if resolve_device("auto") == "npu" else {"num_gpus": count}
