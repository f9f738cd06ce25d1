"""The runtime of one process: every object lives in the driver and works in its thread. Friendly to debuggers."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from tranship.lookup import resolve
from tranship.runtime.base import Context, Handle, Kind, RuntimeOptions, ServiceProxy, plain_event
from tranship.types import RunError, UserError


class InlineObjects:
    """An object store that holds the arrays themselves; a reference is the array."""

    def put(self, array: np.ndarray) -> np.ndarray:
        """A read-only copy of `array`."""
        kept = array.copy()
        kept.flags.writeable = False
        return kept

    def get(self, ref: np.ndarray, timeout_s: float) -> np.ndarray:
        """The array; it is there already, so nothing waits."""
        return ref


class InlinePending:
    """A call that has already run."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._value: Any = None
        self._error: Exception | None = None
        try:
            self._value = run()
        except Exception as error:
            self._error = error

    def done(self) -> bool:
        """True."""
        return True

    def result(self, timeout_s: float) -> Any:
        """What the method returned or raised."""
        if self._error is not None:
            raise self._error
        return self._value


class InlineHandle:
    """An object of this process. The limits of calls cannot be kept here: the caller's thread does the work."""

    def __init__(self, name: str, hosted: Any, forget: Callable[[InlineHandle], None]) -> None:
        self.name = name
        self.hosted = hosted
        self._forget = forget
        self._stopped = False

    @property
    def pid(self) -> int:
        """This process."""
        return os.getpid()

    def wait_ready(self, timeout_s: float) -> None:
        """The object was built when it was started."""

    def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """Run a method now and return its result."""
        if self._stopped:
            raise RunError(f"process {self.name!r} was stopped: {method!r} cannot be called")
        return getattr(self.hosted, method)(*args, **kwargs)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> InlinePending:
        """Run a method now and keep its outcome."""
        return InlinePending(lambda: self.call(method, *args, timeout_s=0, **kwargs))

    def alive(self) -> bool:
        """Whether it has not been stopped."""
        return not self._stopped

    def stop(self, timeout_s: float = 5.0) -> None:
        """Close the object and forget it."""
        if self._stopped:
            return
        self._stopped = True
        self._forget(self)
        if hasattr(self.hosted, "close"):
            self.hosted.close()


class InlineServiceProxy:
    """A service of this process."""

    def __init__(self, handle: InlineHandle) -> None:
        self._handle = handle

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method now and return its result."""
        if not self._handle.alive():
            raise RunError(f"service {self._handle.name!r} was stopped: {method!r} cannot be called")
        return getattr(self._handle.hosted, method)(*args, **kwargs)


class InlineRuntime:
    """Hosts every object in the calling process; `poll` gives each loop one pass, in the order they were started."""

    def __init__(self, options: RuntimeOptions) -> None:
        if options.ray_address is not None:
            raise UserError(
                f"placement.ray_address {options.ray_address!r} needs placement.runtime=ray: "
                "set it, or leave ray_address out"
            )
        self.objects = InlineObjects()
        self._handles: dict[str, tuple[InlineHandle, Kind]] = {}
        self._wakeup = threading.Event()
        self._events: deque[tuple[str, dict[str, Any]]] = deque()
        self._threads_before = torch.get_num_threads()

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
        """Build an object here. num_threads holds for the whole process until shutdown; devices are all visible."""
        if node not in (None, *self.nodes()):
            raise RunError(f"there is no node {node!r}: one process has {self.nodes()} alone")
        if name in self._handles:
            raise RunError(f"a process called {name!r} is already running: stop it first")
        if num_threads is not None:
            torch.set_num_threads(num_threads)

        def emit(event: dict[str, Any]) -> None:
            self._events.append((name, plain_event(event)))
            self._wakeup.set()

        context = Context(name, self._wakeup, emit, self.objects)
        hosted = resolve(factory, {}, f"process {name!r}")(**kwargs, context=context)
        handle = InlineHandle(name, hosted, self._forget)
        self._handles[name] = (handle, kind)
        return handle

    def _forget(self, handle: InlineHandle) -> None:
        del self._handles[handle.name]

    def nodes(self) -> list[str]:
        """The one that there is."""
        return ["local"]

    def service_proxy(self, name: str) -> ServiceProxy:
        """A proxy that calls the service directly."""
        entry = self._handles.get(name)
        if entry is None or entry[1] != "service":
            raise RunError(f"there is no running service called {name!r}")
        return InlineServiceProxy(entry[0])

    def poll(self, timeout_s: float) -> bool:
        """One pass of each loop; if none did anything, a wait for the shared wake-up."""
        self._wakeup.clear()
        progress = False
        for handle, kind in list(self._handles.values()):
            if kind != "loop" or not handle.alive():
                continue
            try:
                progress |= bool(handle.hosted.poll())
            except Exception as error:
                error.add_note(f"raised by process {handle.name!r}")
                raise
        if progress or self._events:
            return True
        self._wakeup.wait(timeout_s)
        return bool(self._events)

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """What was emitted since the last call."""
        drained = []
        while self._events:
            drained.append(self._events.popleft())
        return drained

    def shutdown(self) -> None:
        """Close every object, loops before services; all of them, even if one of them raises."""
        entries = sorted(self._handles.values(), key=lambda entry: entry[1] == "loop")
        with ExitStack() as stack:
            stack.callback(torch.set_num_threads, self._threads_before)
            for handle, _ in entries:
                stack.callback(handle.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
