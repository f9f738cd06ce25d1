"""A sampler that is spread over several processes, as one process of the run: its first rank and those that follow."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tranship.runtime import Handle, Pending

# What every rank is told; all else is for the first one alone.
_FOR_ALL = ("connect_weights", "announce_weights", "timings", "profile_step")


class Together:
    """Calls of several processes as one. merge: makes the result of theirs."""

    def __init__(self, pendings: Sequence[Pending], merge: Callable[[list[Any]], Any]) -> None:
        self._pendings = pendings
        self._merge = merge

    def done(self) -> bool:
        """Whether all of them are."""
        return all(pending.done() for pending in self._pendings)

    def result(self, timeout_s: float) -> Any:
        """See `Pending.result`."""
        deadline = time.monotonic() + timeout_s
        left_s = (max(0.0, deadline - time.monotonic()) for _ in self._pendings)
        return self._merge([pending.result(limit_s) for pending, limit_s in zip(self._pendings, left_s, strict=True)])


class Then:
    """A call whose result is an argument of the next one."""

    def __init__(self, first: Pending, then: Callable[[Any], Pending]) -> None:
        self._first = first
        self._then = then
        self._second: Pending | None = None

    def done(self) -> bool:
        """Whether the second one is, or the first one has failed. Starts the second when the first is done."""
        if self._second is None and self._first.done():
            try:
                self._second = self._then(self._first.result(0.0))
            except Exception:
                return True
        return self._second is not None and self._second.done()

    def result(self, timeout_s: float) -> Any:
        """See `Pending.result`."""
        deadline = time.monotonic() + timeout_s
        if self._second is None:
            self._second = self._then(self._first.result(timeout_s))
        return self._second.result(max(0.0, deadline - time.monotonic()))


class Team:
    """`Handle` of the first rank, which speaks for all of them. The ranks meet before they do anything else."""

    def __init__(self, leader: Handle, others: Sequence[Handle]) -> None:
        self.members = (leader, *others)
        self._leader = leader
        self._others = others
        self._meeting: Pending | None = None
        self._met = False

    @property
    def name(self) -> str:
        """The first rank's."""
        return self._leader.name

    @property
    def pid(self) -> int:
        """The first rank's."""
        return self._leader.pid

    def wait_ready(self, timeout_s: float) -> None:
        """Return once all of them have been built and have met."""
        for member in self.members:
            member.wait_ready(timeout_s)
        self._meet().result(timeout_s)
        self._met = True

    def call(self, method: str, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
        """See `Handle.call`."""
        return self.submit(method, *args, **kwargs).result(timeout_s)

    def submit(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Start a method: of every rank, or of the first one. Until they have met, it waits for that."""
        if self._met:
            return self._submit(method, *args, **kwargs)
        return Then(self._meet(), lambda _: self._submit(method, *args, **kwargs))

    def _submit(self, method: str, *args: Any, **kwargs: Any) -> Pending:
        self._met = True
        if method == "fetch_weights":
            # The first rank has the others fetch it too, as soon as they know of it.
            for other in self._others:
                other.submit("announce_weights", *args)
        elif method in _FOR_ALL:
            calls = [member.submit(method, *args, **kwargs) for member in reversed(self.members)]
            return Together(calls, _added if method == "timings" else lambda results: results[-1])
        return self._leader.submit(method, *args, **kwargs)

    def _meet(self) -> Pending:
        if self._meeting is None:
            doors = Together([other.submit("door") for other in self._others], lambda doors: doors)
            self._meeting = Then(doors, lambda found: self._leader.submit("lead", found))
        return self._meeting

    def alive(self) -> bool:
        """Whether all of them are."""
        return all(member.alive() for member in self.members)

    def stop(self, timeout_s: float = 5.0) -> None:
        """End all of them."""
        for member in self.members:
            member.stop(timeout_s)


def members(handle: Handle) -> tuple[Handle, ...]:
    """The processes behind a handle."""
    return handle.members if isinstance(handle, Team) else (handle,)


def _added(timings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    total: defaultdict[str, float] = defaultdict(float)
    for one in timings:
        for name, value in one.items():
            total[name] += value
    return dict(total)
