"""A dock whose process may be killed: what its messages did is journalled, and a successor does it again.

The dock is a state machine: the same messages at the same times lead to the same state. What depends on the world, how
a slab was found, is journalled as it went. The slabs themselves, and what was written into them, outlive the process.
Leases outlive it too, with their full time from the restart on; a message that a client repeats because it never heard
the answer is answered as it was the first time. The journal starts again whenever the dock holds nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tranship.dock.dock import Dock
from tranship.dock.errors import DockFull, StaleLease, StaleSlab
from tranship.dock.journal import Journal
from tranship.dock.messages import HOME
from tranship.dock.shared_folder import JOURNAL
from tranship.dock.warehouse import LeaseOutcome
from tranship.dock.wire import Request, decode_request, encode_failure, encode_reply
from tranship.types import RunError, UserError

_log = logging.getLogger(__name__)
_COMPACT_BYTES = 1 << 20
_MAY_EMPTY = ("advance", "finish_val", "drop", "ack")
_LOOKS_ONLY = (
    "status",
    "changed",
    "places",
    "place_after",
    "num_admissible",
    "payload_folder",
    "memory_use",
    "ledger_counts",
    "snapshot",
)
_EXPECTED = (StaleLease, StaleSlab, DockFull, UserError, RunError, ValueError, TypeError, KeyError)


@dataclass
class Clock:
    """Seconds that stand still while a message is worked on, so that they can be journalled."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class DurableDock:
    """Runs a dock's messages, and remembers them.

    make_dock(clock, adopt): a dock that reads that clock; adopt: the folder of a predecessor (None: a new one). With a
    predecessor's folder its journal is worked through first, and its leases last for their full time from now on.
    now: seconds of a clock that goes on from one process to the next.
    """

    def __init__(
        self,
        make_dock: Callable[[Clock, Path | None], Dock],
        adopt: Path | None = None,
        *,
        journalled: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now = now
        self._clock = Clock(now())
        self.dock = make_dock(self._clock, adopt)
        self._last: dict[str, tuple[int, bytes]] = {}
        self._acknowledged: dict[str, int] = {}
        folder = self.dock.payload_folder()
        self._journal: Journal | None = None
        if journalled:
            assert folder is not None, "payload in memory of this process does not outlive it: nothing to journal"
            self._journal = Journal(Path(folder) / JOURNAL)
        if adopt is not None:
            assert self._journal is not None
            self._recover(self._journal)
        elif self._journal is not None:
            self._write("w", self._clock.now, self.dock.warehouse.snapshot())

    @classmethod
    def of(cls, dock: Dock) -> DurableDock:
        """A dock without a journal: it ends with its process."""
        return cls(lambda clock, adopt: dock, journalled=False)

    def run(self, name: str, ticket: int, request: Request, body: bytes, *, waiting: bool) -> bytes | None:
        """The reply to a client's message; None, and nothing has been taken, if it gives nothing and would rather wait.

        body: the message as it came. ticket: tells a repeated message from a new one (0: never repeated).
        """
        known = self._last.get(name)
        if ticket and known is not None and known[0] == ticket:
            return known[1]
        self._clock.now = self._now()
        try:
            reply = self._run(name, ticket, request, body, waiting)
        except OSError as error:
            return encode_failure(DockFull(f"the dock's journal cannot be written: {error}"))
        if reply is not None and ticket:
            self._last[name] = (ticket, reply)
        if request.method in _MAY_EMPTY:
            self._compact()
        return reply

    def _run(self, name: str, ticket: int, request: Request, body: bytes, waiting: bool) -> bytes | None:
        now = self._clock.now
        deadline = self.dock.next_deadline()
        is_due = deadline is not None and deadline <= now
        if request.method not in ("ask", "lease_slab"):
            if is_due or not _looks_only(request):
                self._write("m", now, name, ticket, body)
            reply, gave = self._execute(request)
            return None if waiting and not gave else reply
        if is_due:
            self._write("e", now)
            self.dock.expire_now()
        if request.method == "ask":
            return self._ask(name, ticket, request, body, waiting)
        said, warehouse = request.arguments, self.dock.warehouse
        changes = warehouse.changes
        reply, gave = self._execute(request)
        if said.get("node", HOME) != HOME:
            if warehouse.changes != changes:
                self._write_or_seal(said["owner"], "m", now, name, ticket, body)
            return None if waiting and not gave else reply
        outcome = warehouse.last_lease
        if gave or outcome.sealed or outcome.removed:
            known = said.get("giving_up"), list(outcome), reply
            self._write_or_seal(said["owner"], "s", now, name, ticket, said["owner"], *known)
        return None if waiting and not gave else reply

    def _ask(self, name: str, ticket: int, request: Request, body: bytes, waiting: bool) -> bytes | None:
        done = request.arguments.get("done", ())
        if done and not (ticket and self._acknowledged.get(name) == ticket):
            self._write("d", self._clock.now, name, ticket, list(done))
            failure = self._acknowledge(name, ticket, done)
            if failure is not None:
                return failure
        rest = {key: value for key, value in request.arguments.items() if key != "done"}
        reply, gave = self._execute(request._replace(arguments=rest))
        if gave:
            try:
                self._write("m", self._clock.now, name, ticket, body)
            except OSError:
                self.dock.retire(rest["reader"])
                raise
        return None if waiting and not gave else reply

    def _acknowledge(self, name: str, ticket: int, leases: Sequence[int]) -> bytes | None:
        """Acknowledge leases, or none of them if one is over; then the words for that."""
        try:
            for lease in leases:
                self.dock.renew(lease)
            for lease in leases:
                self.dock.ack(lease)
        except _EXPECTED as error:
            return encode_failure(error)
        self._acknowledged[name] = ticket
        return None

    def _write_or_seal(self, owner: str, *entry: Any) -> None:
        """Write down that a slab was leased; if that cannot be, nobody has it."""
        try:
            self._write(*entry)
        except OSError:
            self.dock.warehouse.seal(owner)
            raise

    def _write(self, *entry: Any) -> None:
        if self._journal is not None:
            self._journal.append(*entry)

    def forget(self, name: str) -> None:
        """A client is gone for good: what it had goes back."""
        now = self._clock.now = self._now()
        self._write("g", now, name)
        self._gone(name)
        self._compact()

    def next_deadline(self) -> float | None:
        """When the next lease is over, by time.monotonic."""
        return self.dock.next_deadline()

    def close(self) -> None:
        """Close the journal; the dock stays."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _execute(self, request: Request) -> tuple[bytes, bool]:
        """The reply to a message, and whether it gave something."""
        try:
            result = getattr(self.dock, request.method)(**request.arguments)
        except _EXPECTED as error:
            is_call_wrong = isinstance(error, TypeError | KeyError)
            return encode_failure(ValueError(f"malformed message: {error}") if is_call_wrong else error), True
        except Exception as error:
            _log.exception("the dock failed at %s", request.method)
            return encode_failure(error), True
        gave = result.take is not None if request.method == "ask" else result is not None
        return encode_reply(request.method, result), gave

    def _gone(self, name: str) -> None:
        self._last.pop(name, None)
        self._acknowledged.pop(name, None)
        self.dock.retire(name)

    def _compact(self) -> None:
        """Start the journal again where the dock holds nothing."""
        if self._journal is not None and self._journal.nbytes > _COMPACT_BYTES:
            base = self.dock.base()
            if base is not None:
                last = [[name, ticket, reply] for name, (ticket, reply) in self._last.items()]
                self._journal.start_again("b", 0.0, base, last)

    def _recover(self, journal: Journal) -> None:
        """Do again what the journal says, and go on from there."""
        for kind, *fields in journal.entries():
            self._repeat(kind, fields)
        self._clock.now = self._now()
        lost = self.dock.warehouse.settle()
        if lost:
            journal.append("l", 0.0, lost)
        journal.append("r", self._clock.now)
        self.dock.renew_all()

    def _repeat(self, kind: str, fields: list[Any]) -> None:
        now, *rest = fields
        self._clock.now = now
        if kind == "m":
            name, ticket, body = rest
            request = decode_request(body)
            if request.method == "ask":
                said = {key: value for key, value in request.arguments.items() if key != "done"}
                request = request._replace(arguments=said)
            reply, _ = self._execute(request)
            if ticket:
                self._last[name] = (ticket, reply)
        elif kind == "s":
            name, ticket, owner, giving_up, outcome, reply = rest
            self.dock.warehouse.repeat_lease(owner, giving_up, LeaseOutcome(*outcome))
            if ticket and outcome[2]:
                self._last[name] = (ticket, reply)
        elif kind == "d":
            self._acknowledge(*rest)
        elif kind == "g":
            self._gone(rest[0])
        elif kind == "e":
            self.dock.expire_now()
        elif kind == "r":
            self.dock.renew_all()
        elif kind == "w":
            self.dock.warehouse.restore(rest[0])
        elif kind == "l":
            self.dock.warehouse.lose(rest[0])
        else:
            assert kind == "b", kind
            self.dock.restore_base(rest[0])
            self._last = {name: (ticket, reply) for name, ticket, reply in rest[1]}


def _looks_only(request: Request) -> bool:
    """Whether a message changes nothing that a successor needs to know. When a keeper was heard of last is not: a
    successor gives it its full time."""
    return request.method in _LOOKS_ONLY or (request.method == "chores" and not request.arguments.get("done"))
