"""A dock whose process may be killed: what its messages did is journalled, and a successor does it again.

The dock is a state machine: the same messages at the same times lead to the same state. What depends on the world, how
a slab was found, is journalled as it went. The slabs themselves, and what was written into them, outlive the process.
Leases outlive it too, with their full time from the restart on; a message that a client repeats because it never heard
the answer is answered as it was the first time. The journal starts again, with all that the dock holds as its first
entry, when it has grown to a few times the size of that. Room for what a message adds to it is set aside before the
message is worked on, so that the state is never ahead of a journal on a full file system; the messages by which groups
leave have some of it for themselves.
"""

from __future__ import annotations

import gc
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
_COMPACT_BYTES, _COMPACT_GROWTH = 1 << 20, 4
_ROOM_BYTES, _SPARE_BYTES = 1 << 16, 1 << 17
_FREES = ("ack", "release", "trained", "drop", "advance", "finish_val", "retire", "renew", "check", "expire", "chores")
_LOOKS_ONLY = (
    "status",
    "changed",
    "places",
    "place_after",
    "num_admissible",
    "better_elsewhere",
    "payload_folder",
    "memory_use",
    "ledger_counts",
    "snapshot",
)
_WAITS = ("changed", "chores", "place_after")
_EXPECTED = (StaleLease, StaleSlab, DockFull, UserError, RunError, ValueError, TypeError, KeyError)


@dataclass
class Clock:
    """Seconds that stand still while a message is worked on, so that they can be journalled."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def execute(dock: Any, request: Request) -> tuple[bytes, bool]:
    """The reply to a message, and whether it gave something."""
    try:
        result = getattr(dock, request.method)(**request.arguments)
    except _EXPECTED as error:
        is_call_wrong = isinstance(error, TypeError | KeyError)
        return encode_failure(ValueError(f"malformed message: {error}") if is_call_wrong else error), True
    except Exception as error:
        _log.exception("the dock failed at %s", request.method)
        return encode_failure(error), True
    gave = result.take is not None if request.method == "ask" else result is not None
    return encode_reply(request.method, result), gave


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
        self._gone_late: list[str] = []
        self._compact_at = _COMPACT_BYTES
        folder = self.dock.payload_folder()
        self._journal: Journal | None = None
        if journalled:
            assert folder is not None, "payload in memory of this process does not outlive it: nothing to journal"
            self._journal = Journal(Path(folder) / JOURNAL)
            self.dock.loses_nodes_by_clock = False
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
        if name in self._gone_late:
            self._gone_late.remove(name)
        try:
            self._forget_late()
            self._lose_nodes()
            reply = self._run(name, ticket, request, body, waiting)
        except OSError as error:
            return encode_failure(DockFull(f"the dock's journal cannot be written: {error}"))
        if reply is not None and ticket:
            self._last[name] = (ticket, reply)
        self._compact()
        return reply

    def _run(self, name: str, ticket: int, request: Request, body: bytes, waiting: bool) -> bytes | None:
        now = self._clock.now
        deadline = self.dock.next_deadline()
        is_due = deadline is not None and deadline <= now
        if is_due or not _looks_only(request):
            self._make_room(2 * len(body), spare=request.method in _FREES)
        if request.method not in ("ask", "lease_slab", *_WAITS):
            if is_due or not _looks_only(request):
                self._write("m", now, name, ticket, body)
            return self._execute(request)[0]
        if is_due:
            self._write("e", now)
            self.dock.expire_now()
        if request.method == "ask":
            return self._ask(name, ticket, request, body, waiting)
        said, warehouse = request.arguments, self.dock.warehouse
        changes = warehouse.changes
        reply, gave = self._execute(request)
        if request.method in _WAITS:
            if not _looks_only(request):
                self._write("m", now, name, ticket, body)
            return None if waiting and not gave else reply
        if said.get("node", HOME) != HOME:
            if warehouse.changes != changes:
                self._write("m", now, name, ticket, body)
            return None if waiting and not gave else reply
        outcome = warehouse.last_lease
        if gave or outcome.sealed or outcome.removed:
            known = said.get("giving_up"), list(outcome), reply
            self._write("s", now, name, ticket, said["owner"], *known)
        return None if waiting and not gave else reply

    def _ask(self, name: str, ticket: int, request: Request, body: bytes, waiting: bool) -> bytes | None:
        done = request.arguments.get("done", ())
        if done and not (ticket and self._acknowledged.get(name) == ticket):
            self._write("d", self._clock.now, name, ticket, list(done))
            failure = self._acknowledge(name, ticket, done)
            if failure is not None:
                return failure
        rest = {key: value for key, value in request.arguments.items() if key != "done"}
        batch_stage = self.dock.batch_stage
        reply, gave = self._execute(request._replace(arguments=rest))
        if gave:
            self._write("m", self._clock.now, name, ticket, body)
        elif self.dock.batch_stage != batch_stage:
            self._write("t", self._clock.now, self.dock.batch_stage)
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

    def _write(self, *entry: Any) -> None:
        if self._journal is not None:
            self._journal.append(*entry)

    def _make_room(self, nbytes: int, *, spare: bool) -> None:
        """Set room in the journal aside; a full file system gets the slabs back that hold nothing. spare: what is kept
        for messages that free memory may be used. OSError if there is no room, and nothing has changed then."""
        if self._journal is None:
            return
        nbytes += _ROOM_BYTES + (0 if spare else _SPARE_BYTES)
        try:
            self._journal.make_room(nbytes)
        except OSError:
            free = self.dock.warehouse.free_slabs()
            if not free:
                raise
            self._write("l", self._clock.now, free)
            self.dock.warehouse.give_back(free)
            self._journal.make_room(nbytes)

    def forget(self, name: str) -> None:
        """A client is gone for good: what it had goes back; later, if the journal has no room for that now."""
        self._clock.now = self._now()
        self._gone_late.append(name)
        self._forget_late()
        self._compact()

    def _forget_late(self) -> None:
        while self._gone_late:
            name = self._gone_late[0]
            try:
                self._make_room(0, spare=True)
            except OSError as error:
                _log.warning("what %s had goes back later: the dock's journal cannot be written: %s", name, error)
                return
            self._write("g", self._clock.now, name)
            self._gone(self._gone_late.pop(0))

    def _lose_nodes(self) -> None:
        """A successor cannot know when a node was heard of last: that one was lost is written down."""
        now = self._clock.now
        for node in self.dock.warehouse.overdue(now) if self._journal is not None else ():
            self._make_room(0, spare=True)
            self._write("n", now, node)
            self.dock.lose_node(node)

    def next_deadline(self) -> float | None:
        """When the next lease is over, by time.monotonic."""
        return self.dock.next_deadline()

    def close(self) -> None:
        """Close the journal; the dock stays."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _execute(self, request: Request) -> tuple[bytes, bool]:
        return execute(self.dock, request)

    def _gone(self, name: str) -> None:
        self._last.pop(name, None)
        self._acknowledged.pop(name, None)
        self.dock.retire(name)

    def _compact(self) -> None:
        """Start the journal again if it is much longer than what the dock holds."""
        if self._journal is None or self._journal.nbytes < self._compact_at:
            return
        # Two thirds of the time would go into collections that find nothing: everything here is needed to the end.
        collects = gc.isenabled()
        gc.disable()
        try:
            last = [[name, ticket, reply] for name, (ticket, reply) in self._last.items()]
            entry = ("b", self._clock.now, self.dock.base(), last, list(self._acknowledged.items()))
            self._journal.start_again(*entry, room=_ROOM_BYTES + _SPARE_BYTES)
        except OSError as error:
            _log.warning("the dock's journal cannot start again now: %s", error)
            self._compact_at = 2 * self._journal.nbytes
        else:
            self._compact_at = max(_COMPACT_BYTES, _COMPACT_GROWTH * self._journal.nbytes)
        finally:
            if collects:
                gc.enable()

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
        elif kind == "n":
            self.dock.lose_node(rest[0])
        elif kind == "t":
            self.dock.bind_batch_stage(rest[0])
        else:
            assert kind == "b", kind
            self.dock.restore_base(rest[0])
            self._last = {name: (ticket, reply) for name, ticket, reply in rest[1]}
            self._acknowledged = dict(rest[2])


def _looks_only(request: Request) -> bool:
    """Whether a message changes nothing that a successor needs to know. When a keeper was heard of last is not: a
    successor gives it its full time."""
    return request.method in _LOOKS_ONLY or (request.method == "chores" and not request.arguments.get("done"))
