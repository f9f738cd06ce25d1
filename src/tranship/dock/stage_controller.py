"""A stage's controller in a process of its own: `StageDock` behind a service, fed from the dock by threads.

One thread serves the readers and says short things to the dock. For each kind of rows that readers want, another one
waits at the dock until there are some, and hands them over; one more sees to it that the dock's leases are renewed.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from tranship.dock.durable import execute
from tranship.dock.frames import ConnectionLost
from tranship.dock.link import DockLink
from tranship.dock.loans import ask_home
from tranship.dock.messages import Kind, StageNeeds
from tranship.dock.service import DockService
from tranship.dock.stage_dock import StageDock
from tranship.dock.wire import Request, encode_failure

_log = logging.getLogger(__name__)
_PARK_S = 30.0
_NEVER = 1 << 62  # No seq is ever larger.
_ABOUT_LEASES = ("publish", "ack", "release", "renew", "check", "started", "drop", "trained")
_METHODS = ("ask", *_ABOUT_LEASES, "status", "changed", "expire", "retire")


class _Runner:
    """Runs the messages of a stage's readers. One that is repeated over another connection finds its lease over."""

    def __init__(self, dock: StageDock) -> None:
        self.dock = dock

    def run(self, name: str, ticket: int, request: Request, body: bytes, *, waiting: bool) -> bytes | None:
        """The reply to a reader's message; None if it gives nothing, and would rather wait."""
        if request.method not in _METHODS:
            return encode_failure(ValueError(f"{request.method!r} is for the dock, not for a stage's controller"))
        if request.method == "ask":
            request = request._replace(arguments=request.arguments | {"waiting": waiting})
        reply, gave = execute(self.dock, request)
        return None if waiting and not gave and request.method in ("ask", "changed") else reply

    def forget(self, name: str) -> None:
        """A reader is gone: what it had goes back."""
        self.dock.retire(name)


class StageController:
    """Serves the readers of one stage from now on, in threads of its own, until it is closed or the dock is gone.

    needs: the stage, as the dock knows it. home: the dock's address. addresses: "unix:PATH", "tcp:HOST:PORT", for
    readers (see routes). secret: the run's. number: see stage_number. lease_s: the dock's. prefetch: how many groups
    (or rows) are taken from the dock at once, if no reader asks for more. reconnect_s: see DockLink.

    If its process ends, the dock takes back what it had, and a successor starts with nothing. ConnectionLost if the
    dock is not there.
    """

    def __init__(
        self,
        needs: StageNeeds,
        home: str,
        addresses: Sequence[str],
        *,
        secret: bytes,
        number: int,
        lease_s: float,
        prefetch: int = 64,
        reconnect_s: float = 0.0,
    ) -> None:
        self.failure: Exception | None = None
        self._needs = needs
        self._name = f"controller/{needs.name}/{secrets.token_hex(4)}"
        self._connect = partial(DockLink, home, secret, reconnect_s=reconnect_s)
        self._lease_s = lease_s
        self._ended = threading.Event()
        self._links: list[DockLink] = []
        self._home = self._link(self._name)
        self._wanted: dict[Kind, queue.SimpleQueue[int | None]] = {}
        self._dock = StageDock(
            needs,
            self._say,
            number=number,
            name=self._name,
            lease_s=lease_s,
            prefetch=prefetch,
            await_rows=self._await_rows,
        )
        self._service = DockService(_Runner(self._dock), addresses, secret=secret, place=self._home.place).start()
        self.addresses = self._service.addresses
        threading.Thread(target=self._keep, name=f"keep-{needs.name}", daemon=True).start()

    def wait(self) -> None:
        """Return when it is closed. Raises what ended it: ConnectionLost when the dock is gone."""
        self._ended.wait()
        if self.failure is not None:
            raise self.failure

    def close(self) -> None:
        """Stop serving. The dock takes back what this had from it."""
        self._end(None)
        self._service.close()

    def _link(self, name: str) -> DockLink:
        """One more connection to the dock, which ends with this."""
        link = self._connect(name)
        self._links.append(link)
        if self._ended.is_set():
            link.close()
        return link

    def _end(self, failure: Exception | None) -> None:
        if self._ended.is_set():
            return
        if failure is not None:
            _log.warning("the controller of stage %s ends: %s", self._needs.name, failure)
        self.failure = failure
        self._ended.set()
        self._service.stop()
        for wanted in list(self._wanted.values()):
            wanted.put(None)
        for link in list(self._links):
            link.close()

    def _say(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """A short message to the dock, from the thread that serves."""
        try:
            return self._home.call(method, *args, **kwargs)
        except ConnectionLost as error:
            self._end(error)
            raise

    def _keep(self) -> None:
        """Have the dock's leases renewed well before they are over, and find out at once when the dock is gone."""
        try:
            link = self._link(f"{self._name}/keep")
            while not self._ended.is_set():
                link.call("changed", _NEVER, wait_s=self._lease_s / 3)
                self._service.post(partial(self._guarded, self._dock.keep))
        except ConnectionLost as error:
            self._end(error)

    def _await_rows(self, kind: Kind, count: int) -> None:
        if kind not in self._wanted:
            self._wanted[kind] = queue.SimpleQueue()
            threading.Thread(target=self._feed, args=(kind,), name=f"feed-{self._needs.name}", daemon=True).start()
        self._wanted[kind].put(count)

    def _feed(self, kind: Kind) -> None:
        """Bring rows of a kind, each time that they are wanted."""
        name = f"{self._name}/{kind}"
        try:
            link = self._link(name)
            while (count := self._wanted[kind].get()) is not None:
                take = None
                while take is None:
                    take = ask_home(link.call, self._needs, name, (kind,), count, wait_s=_PARK_S).take
                self._service.post(partial(self._guarded, self._dock.receive, kind, take, count))
        except Exception as error:
            self._end(error)

    def _guarded(self, change: Any, *args: Any) -> None:
        """Do something in the thread that serves; what it raises ends the controller."""
        try:
            change(*args)
        except Exception as error:
            self._end(error)
