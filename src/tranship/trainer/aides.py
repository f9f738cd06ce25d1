"""The processes that help a dock with its work: warehouses of other nodes, and controllers of single stages. Each is
replaced when it dies, and done without when that cannot be."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tranship.observe import Recorder
from tranship.runtime import Handle, Pending, ProcessDied
from tranship.types import RunError, UserError

START_S = 600.0


@dataclass
class Aide:
    """One of them. start(left): begins its process; left: what a predecessor said when it was asked for its `left`
    (None: there was none). may_start: whether another one can be started. lost, without: the kind of the event, and the
    words, when it is done without.
    """

    start: Callable[[str | None], Handle]
    lost: str
    without: str
    may_start: Callable[[], bool] = lambda: True


@dataclass
class _Seat:
    """The place of an aide, and the process that fills it. joining: its `left`, while a successor gets ready. gone: the
    processes that have been replaced here."""

    aide: Aide
    handle: Handle
    left: str | None = None
    deaths: int = 0
    since: float = 0.0
    joining: Pending | None = None
    gone: set[int] = field(default_factory=set)


class Aides:
    """Starts them and watches over them. limit: how often one is started again without `batch_trained` between."""

    def __init__(self, recorder: Recorder, limit: int) -> None:
        self._recorder = recorder
        self._limit = limit
        self._seats: dict[str, _Seat] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._seats

    @property
    def handles(self) -> list[Handle]:
        """Their processes."""
        return [seat.handle for seat in self._seats.values()]

    def start(self, aides: Sequence[Aide]) -> None:
        """Start them, and wait until they are ready. One that dies meanwhile is done without."""
        for aide in aides:
            handle = aide.start(None)
            self._seats[handle.name] = _Seat(aide, handle)
        for seat in list(self._seats.values()):
            try:
                seat.handle.wait_ready(START_S)
                seat.left = seat.handle.call("left", timeout_s=START_S)
            except ProcessDied as death:
                if death.name != seat.handle.name:
                    raise
                self._lose(death)

    def replace(self, death: ProcessDied) -> None:
        """Start another process in the place of a dead one, if that is possible; once for each that has died."""
        seat = self._seats[death.name]
        if death.pid in seat.gone:
            # Its connection and its process were both heard of.
            return
        if death.pid:
            seat.gone.add(death.pid)
        seat.handle.stop(timeout_s=0)
        if seat.deaths >= self._limit or not seat.aide.may_start():
            self._lose(death)
            return
        values = {"name": death.name, "pid": death.pid, "cause": str(death), "successor": death.name}
        self._recorder.event("worker_died", values, say=f"{death}; another one takes its place")
        seat.deaths += 1
        seat.since = time.monotonic()
        seat.handle = seat.aide.start(seat.left)
        seat.joining = seat.handle.submit("left")

    def join(self) -> None:
        """Note the successors that have become ready; one that could not begin is started once more."""
        failed: list[ProcessDied] = []
        for seat in self._seats.values():
            if seat.joining is None or not seat.joining.done():
                continue
            pending, seat.joining = seat.joining, None
            try:
                seat.left = pending.result(START_S)
            except (RunError, UserError) as error:
                if not isinstance(error, ProcessDied) or error.name != seat.handle.name:
                    # It could not begin: what it was to go on from, or the dock, was gone.
                    seat.left = None
                    failed.append(ProcessDied(f"{seat.handle.name}: {error}", seat.handle.name, seat.handle.pid))
                continue
            name, pid = seat.handle.name, seat.handle.pid
            seconds = round(time.monotonic() - seat.since, 3)
            said = f"{name} serves again, after {seconds:.1f} s"
            self._recorder.event("worker_replaced", {"name": name, "pid": pid, "after_s": seconds}, say=said)
        for death in failed:
            self.replace(death)

    def batch_trained(self) -> None:
        """The run has moved on: they may be started again as often as at its beginning."""
        for seat in self._seats.values():
            seat.deaths = 0

    def _lose(self, death: ProcessDied) -> None:
        seat = self._seats.pop(death.name)
        values = {"name": death.name, "pid": death.pid, "cause": str(death)}
        self._recorder.event(seat.aide.lost, values, say=f"{death}; {seat.aide.without}")
