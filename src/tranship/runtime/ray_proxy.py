"""Calls to a hosted Ray process, seen from any other: outcomes unwrapped, deaths and limits named."""

from __future__ import annotations

import re
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from tranship.runtime.base import CallTimeout, ProcessDied
from tranship.runtime.ray_host import Reply
from tranship.types import RunError


def describe_death(error: RayError) -> str:
    """What Ray knows of why a process is gone, in one line."""
    text = " ".join(str(error).split())
    found = re.search(r"Worker exit detail: (.*?)(?: There are some potential| Some common causes|$)", text)
    return found.group(1).strip() if found else text


def open_reply(ref: Any, name: str, pid: int, method: str, timeout_s: float, limit_s: float | None = None) -> Any:
    """The value behind a call's reference; raises what the method raised, ProcessDied or CallTimeout.

    limit_s: the whole limit of the call, for the message, where timeout_s is what is left of it.
    """
    try:
        received: Any = ray.get(ref, timeout=timeout_s)
    except GetTimeoutError as error:
        limit_s = timeout_s if limit_s is None else limit_s
        raise CallTimeout(f"process {name!r} (pid {pid}): {method!r} did not answer within {limit_s:g} s") from error
    except RayActorError as error:
        raise ProcessDied(f"process {name!r} (pid {pid}) died: {describe_death(error)}", name, pid) from error
    except RayTaskError as error:
        raise RunError(f"process {name!r} (pid {pid}): {method!r} could not be called: {error.cause}") from error
    reply: Reply = received
    if reply.failure is not None:
        raise reply.failure.exception()
    return reply.value


class RayServiceProxy:
    """A service in another process. Picklable."""

    def __init__(self, name: str, pid: int, actor: Any, timeout_s: float = 60.0) -> None:
        self._name = name
        self._pid = pid
        self._actor = actor
        self._timeout_s = timeout_s

    def __reduce__(self) -> tuple[Any, ...]:
        return RayServiceProxy, (self._name, self._pid, self._actor, self._timeout_s)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method there and return its result; raises CallTimeout after timeout_s."""
        ref = self._actor.call.remote(method, args, kwargs)
        return open_reply(ref, self._name, self._pid, method, self._timeout_s)
