"""What a runtime is: it hosts objects, in this process or in others, and knows nothing of what they do.

Two kinds of object. A *service* has short methods, run one after the other, and is shared by name (a queue, a
directory). A *loop* has `poll() -> bool`, one pass of its work (True: something was done), which its host runs again
and again; methods that others call run between two passes, on the same thread, so neither kind needs a lock. An object
that has `close()` gets it called when it is stopped.

Arguments and results that cross a process border are copies, and numpy arrays among them may be read-only: treat them
so everywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import msgpack
import numpy as np

from tranship.types import RunError

Kind = Literal["service", "loop"]


class ProcessDied(RunError):
    """A hosted process is gone or does not answer. name, pid: which (pid 0: it never said)."""

    def __init__(self, message: str, name: str = "", pid: int = 0) -> None:
        super().__init__(message)
        self.name = name
        self.pid = pid


class CallTimeout(RunError):
    """A call was not answered within its limit; it may still be running."""


class ObjectStore(Protocol):
    """Immutable arrays that any process of the run can read. An array lives as long as a reference to it does."""

    def put(self, array: np.ndarray) -> Any:
        """Store a copy of `array` and return a reference, which may travel in arguments and results."""
        ...

    def get(self, ref: Any, timeout_s: float) -> np.ndarray:
        """The array behind `ref`, read-only. Raises RunError if it is lost (its owner died) or the limit passed."""
        ...


@dataclass(frozen=True)
class Context:
    """What a hosted object gets from its host, as the keyword argument `context` of its factory.

    name: the process's. wakeup: set it, from any thread, to have `poll` run again soon. emit: send a small dictionary
    (what msgpack can carry) to the driver. objects: the store of immutable arrays. node: the name of the node that it
    is on. host: the address under which other nodes reach this one; "127.0.0.1" where there are none.
    """

    name: str
    wakeup: threading.Event
    emit: Callable[[dict[str, Any]], None]
    objects: ObjectStore
    node: str = "local"
    host: str = "127.0.0.1"


class Pending(Protocol):
    """A call under way."""

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        ...

    def result(self, timeout_s: float) -> Any:
        """What the method returned; its exception, of the same type, if it raised; CallTimeout after the limit."""
        ...


class ServiceProxy(Protocol):
    """A service as other objects see it; may be an argument of another object's factory."""

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the service and return its result, or raise its exception."""
        ...


class Handle(Protocol):
    """A hosted object as the driver sees it."""

    @property
    def name(self) -> str:
        """The name it was started under."""
        ...

    @property
    def pid(self) -> int:
        """The process that hosts it."""
        ...

    def wait_ready(self, timeout_s: float) -> None:
        """Return once the object has been built. Raises what its factory raised, or CallTimeout."""
        ...

    def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """Run a method and return its result, or raise its exception. Same as `submit(...).result(timeout_s)`."""
        ...

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Start a method; where processes are real, two submitted calls may start in either order."""
        ...

    def alive(self) -> bool:
        """Whether it can still be called, as far as is known without waiting."""
        ...

    def stop(self, timeout_s: float = 5.0) -> None:
        """Let the current pass end, close the object, end its process (by force after the limit), forget it."""
        ...


class Runtime(Protocol):
    """Where hosted objects live."""

    @property
    def objects(self) -> ObjectStore:
        """The store of immutable arrays."""
        ...

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
        """Host the object that `factory` ("module:callable" or "file.py:callable") makes of `kwargs` and a Context.

        num_threads: of its numerical libraries (None: they decide). num_accelerators: devices set aside for it.
        node: one of `nodes`; None: of several, that of the driver gets the services, and loops are spread over all.
        May return before the object is built: an error of the factory is raised by `wait_ready`, by calls, or here.
        """
        ...

    def nodes(self) -> list[str]:
        """The names of the nodes that live, the driver's first."""
        ...

    def service_proxy(self, name: str) -> ServiceProxy:
        """A proxy of the service that was started under `name`."""
        ...

    def poll(self, timeout_s: float) -> bool:
        """Let hosted objects work until one has something to say, at most for timeout_s; True if there was progress.

        inline: one pass of each loop, then a wait if none did anything. ray: a wait for events. Raises ProcessDied,
        once for each process, when one died or went silent, and what a loop's `poll` raised.
        """
        ...

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """What objects emitted since the last call, (name, event), each object's in the order it emitted them."""
        ...

    def shutdown(self) -> None:
        """Stop every object and end every process that this runtime started. A second call does nothing."""
        ...

    def __enter__(self) -> Self:
        """Itself."""
        ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        """Shut down."""
        ...


@dataclass(frozen=True)
class RuntimeOptions:
    """How a runtime is set up.

    ray_address: a Ray cluster to join; None: one of its own, on 127.0.0.1. num_cores: how many cores its own cluster
    may count on (None: what this process may use). object_store_bytes: size of its own cluster's object store.
    log_to_driver: show what processes print.
    """

    ray_address: str | None = None
    num_cores: int | None = None
    object_store_bytes: int = 1 << 30
    log_to_driver: bool = False


def plain_event(event: dict[str, Any]) -> dict[str, Any]:
    """A copy of an event as it arrives on the other side of a wire. Raises TypeError for what msgpack cannot carry."""
    return msgpack.unpackb(msgpack.packb(event), strict_map_key=False)
