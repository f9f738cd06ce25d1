"""The processes of a run, watched over: the one place that knows which of them live.

A worker that holds nothing but work in hand (a sampler, a reward model of its own) is started again beside the others
when it dies: what it had goes back to the dock, others go on, and its successor serves once its weights have been
fetched, verified and probed. A dock with a journal gets a successor too, which goes on where it was, and so do the
processes that help it (`aides`). The death of any other process is told to the run, which goes back to its last cut.
"""

from __future__ import annotations

import shutil
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tranship.dock import DockAccess
from tranship.dock.frames import new_secret
from tranship.observe import Recorder
from tranship.runtime import CallTimeout, Handle, Pending, ProcessDied, Runtime
from tranship.trainer.aides import Aide, Aides
from tranship.trainer.placement import WorkerPlan
from tranship.trainer.preflight import Report
from tranship.trainer.processes import (
    START_S,
    controller_aide,
    dock_client,
    dock_name,
    start_dock,
    start_worker,
    warehouse_aide,
)
from tranship.trainer.team import members
from tranship.types import RunError
from tranship.worker.spec import endpoint_file
from tranship.worker.weights import WeightsReady

# Longer than any update or transfer that a coordinator should wait for in silence.
COMMAND_S = 3600.0
# How long a step's record waits for what other workers than the trainer say of their time.
_TIMINGS_S = 2.0
# While a successor gets ready, it is looked at so often.
_JOIN_S = 0.1
# So long after a worker's error, the death of a process that it leaned on would be known.
_CAUSE_S = 3.0


@dataclass
class _Seat:
    """The place of a worker that can be replaced, and the process that fills it now.

    joining: the steps that are left until it serves, and the one under way. starts: of processes in this seat.
    fruitless: those since a batch was trained last. asked: its timings, not heard yet.
    """

    plan: WorkerPlan
    handle: Handle
    starts: int = 1
    fruitless: int = 0
    since: float = 0.0
    predecessor: str = ""
    joining: Pending | None = None
    steps: list[Callable[[], Pending]] = field(default_factory=list)
    asked: Pending | None = None

    @property
    def samples(self) -> bool:
        """Whether it needs the weights."""
        return "rollout" in self.plan.stages


class Supervisor:
    """Starts a run's processes, carries the coordinator's words to them, and replaces those that can be.

    attempt: how often the run has gone back to a cut before. Any method may raise ProcessDied: the dock or the trainer
    is gone, and the run can only go on from its last cut.
    """

    def __init__(self, runtime: Runtime, report: Report, run_dir: Path, recorder: Recorder, attempt: int) -> None:
        self._runtime = runtime
        self._report = report
        self._recorder = recorder
        self._handles: list[Handle] = []
        self._seats: list[_Seat] = []
        self._ends: tuple[Any, Any] | None = None
        self._ready: WeightsReady | None = None
        run_id = dock_name(run_dir, attempt)
        self._dock_of = partial(start_dock, runtime, report, run_id, new_secret())
        self._aides = Aides(recorder, report.config.run.max_restarts)
        self._run_id = run_id
        self._run_dir = run_dir
        self._access: DockAccess | None = None
        self._folder: str | None = None
        self._dock_deaths = 0
        self._heard: deque[Exception] = deque()
        self._replaced: set[str] = set()

    def start(self) -> None:
        """Start the dock and the workers; returns when all of them are ready."""
        self._forget_endpoint("*")
        self._handles = [self._dock_of()]
        if make := self._aides_of_dock():
            self._await(0, self._dock_of)
            access = self._find_dock()
            self._aides.start([one(access) for one in make])
        starts = [partial(start_worker, self._runtime, self._report, plan, plan.name) for plan in self._report.workers]
        self._handles += [start() for start in starts]
        for index, start in enumerate([self._dock_of, *starts]):
            self._await(index, start)
        dock, self.trainer, *others = self._handles
        self._seats = [_Seat(plan, handle) for plan, handle in zip(self._report.workers[1:], others, strict=True)]
        self.dock = dock_client(dock, self._report, self._hear)
        if self._report.config.placement.runtime != "inline":
            access = self._find_dock()
            self._folder = access.folder
            self._access = access if self._report.config.dock.journal else None
        self._recorder.event("processes", {"pids": {handle.name: handle.pid for handle in self._all_handles()}})

    def _await(self, index: int, start: Callable[[], Handle]) -> None:
        """Wait for a process to be ready. One that dies before is started again, once: a cluster may have put it on a
        node that was gone already."""
        handle = self._handles[index]
        try:
            handle.wait_ready(START_S)
        except ProcessDied as death:
            _check_own(death, handle)
            self._recorder.event("start_again", {"name": handle.name, "cause": str(death)}, say=f"{death}; once more")
            handle.stop(timeout_s=0)
            self._handles[index] = start()
            self._handles[index].wait_ready(START_S)

    def end(self) -> None:
        """End every process, however it is, so that others can be started in their place."""
        for handle in self._all_handles():
            handle.stop(timeout_s=0)
        self._forget_endpoint("*")
        if self._folder is not None:
            # A dock that died has left it, and gets no successor.
            shutil.rmtree(self._folder, ignore_errors=True)
        # What they said last is about work that nobody goes on with.
        self._runtime.events()

    # What happens

    def poll(self, timeout_s: float) -> None:
        """Let processes work until one has something to say, and replace those that have died."""
        joining = any(seat.joining is not None for seat in self._seats)
        try:
            if self._heard:
                raise self._heard.popleft()
            self._runtime.poll(min(timeout_s, _JOIN_S) if joining else timeout_s)
        except ProcessDied as death:
            self._replace(death)
        for seat in self._seats:
            self._join(seat)
        self._aides.join()

    def events(self) -> list[tuple[str, dict[str, Any]]]:
        """What workers emitted since the last call."""
        return self._runtime.events()

    def batch_trained(self) -> None:
        """The run has moved on: workers may be started again as often as at its beginning."""
        self._dock_deaths = 0
        self._aides.batch_trained()
        for seat in self._seats:
            seat.fruitless = 0

    def cause(self, error: Exception) -> Exception:
        """The death that is behind an error; the error itself if there is none.

        What a worker says when the dock or the trainer has gone is only a consequence, and may come before the cause.
        """
        if isinstance(error, ProcessDied) or not isinstance(error, RunError):
            return error
        deadline = time.monotonic() + (0.0 if self._report.config.placement.runtime == "inline" else _CAUSE_S)
        replaceable = {process.name for seat in self._seats for process in members(seat.handle)}
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                self._runtime.poll(left_s)
                self._runtime.events()
            except ProcessDied as death:
                if death.name not in replaceable:
                    return death
            except Exception as other:
                error.add_note(f"besides: {type(other).__name__}: {other}")
        return error

    # What the coordinator tells workers

    def connect(self) -> None:
        """Plan the way of the weights from the trainer to the samplers."""
        samplers = [seat.handle for seat in self._seats if seat.samples]
        if samplers:
            source = self.trainer.call("pieces", timeout_s=COMMAND_S)
            ranks = members(samplers[0])
            self._ends = source, [rank.call("pieces", timeout_s=COMMAND_S) for rank in ranks]
            for worker in (self.trainer, *samplers):
                worker.call("connect_weights", *self._ends, timeout_s=COMMAND_S)

    def publish(self, version: int) -> None:
        """The trainer's weights are version `version`; where samplers are elsewhere, they can be fetched."""
        self._ready = self.trainer.call("publish_weights", version, timeout_s=COMMAND_S)

    def announce(self) -> None:
        """Tell the samplers of the published version."""
        for seat in self._seats:
            if seat.samples and seat.joining is None:
                seat.handle.submit("announce_weights", self._ready)

    def fetch(self) -> None:
        """Every sampler that serves uses the published version when this returns."""
        serving = [seat.handle for seat in self._seats if seat.samples and seat.joining is None]
        for sampler, pending in [(sampler, sampler.submit("fetch_weights", self._ready)) for sampler in serving]:
            try:
                pending.result(COMMAND_S)
            except ProcessDied as death:
                # Its successor begins with this version.
                _check_own(death, sampler)

    def profile(self, step: int) -> None:
        """Step `step` begins."""
        self.trainer.call("profile_step", step, timeout_s=COMMAND_S)
        for seat in self._seats:
            seat.handle.submit("profile_step", step)

    def interrupt(self) -> None:
        """Begin no further work."""
        for worker in self._handles[1:]:
            worker.submit("interrupt")

    def timings(self) -> dict[str, float]:
        """Busy seconds by stage over all workers, of what they did since they were asked last, and their `rss_bytes`.

        A worker other than the trainer that does not answer in time is heard at the next call.
        """
        total: defaultdict[str, float] = defaultdict(float)
        for seat in self._seats:
            seat.asked = seat.asked or (seat.handle.submit("timings") if seat.joining is None else None)
        answers = [self.trainer.call("timings", timeout_s=COMMAND_S)]
        deadline = time.monotonic() + _TIMINGS_S
        for seat in self._seats:
            if seat.asked is None:
                continue
            try:
                answers.append(seat.asked.result(max(0.0, deadline - time.monotonic())))
            except CallTimeout:
                continue
            except ProcessDied as death:
                _check_own(death, seat.handle)
            seat.asked = None
        for answer in answers:
            for name, seconds in answer.items():
                total[name] += seconds
        return dict(total)

    # Starting again

    def _replace(self, death: ProcessDied) -> None:
        """Give the seat of a dead worker to a new process; the death itself, if it had none."""
        if death.name == self._handles[0].name:
            self._replace_dock(death)
            return
        if death.name in self._aides:
            self._aides.replace(death)
            return
        if death.name in self._replaced:
            # Another rank of the same sampler, which has been started again already.
            return
        seat = next((seat for seat in self._seats if _is_of(death, seat.handle)), None)
        if seat is None:
            raise death
        limit = self._report.config.run.max_restarts
        if seat.fruitless >= limit:
            raise RunError(
                f"{death}; it was started again {seat.fruitless} times since a batch was trained last "
                f"(run.max_restarts {limit})"
            ) from death
        seat.handle.stop(timeout_s=0)
        self._forget_endpoint(seat.handle.name)
        self._replaced.update(process.name for process in members(seat.handle))
        self._handles.remove(seat.handle)
        self.dock.retire(seat.handle.name)
        seat.predecessor, seat.since, seat.asked = seat.handle.name, time.monotonic(), None
        name = f"{seat.plan.name}.{seat.starts}"
        values = {"name": death.name, "pid": death.pid, "cause": str(death), "successor": name}
        said = f"{death}; what it had in hand goes to others, and it is started again as {name}"
        self._recorder.event("worker_died", values, say=said)
        seat.starts += 1
        seat.fruitless += 1
        seat.handle = start_worker(self._runtime, self._report, seat.plan, name)
        self._handles.append(seat.handle)
        # Answered when it has been built.
        seat.joining, seat.steps = seat.handle.submit("timings"), []
        if seat.samples:
            ends = self._ends
            assert ends is not None, "samplers are replaced after they were connected"
            seat.steps.append(lambda: seat.handle.submit("connect_weights", *ends))
            seat.steps.append(lambda: seat.handle.submit("fetch_weights", self._ready))

    def _forget_endpoint(self, process: str) -> None:
        """Nobody finds the endpoint of a process that is gone any more. "*": those of all processes."""
        file = endpoint_file(self._run_dir, process)
        for found in file.parent.glob(file.name):
            found.unlink(missing_ok=True)

    def _hear(self) -> None:
        """While the coordinator waits for the dock: give it a successor if it has died. Other news wait for `poll`."""
        try:
            self._runtime.poll(0.0)
        except ProcessDied as death:
            if death.name == self._handles[0].name:
                self._replace_dock(death)
            else:
                self._heard.append(death)
        except Exception as error:
            self._heard.append(error)

    def _replace_dock(self, death: ProcessDied) -> None:
        """Start another dock from what the dead one left; the death itself, if that cannot be."""
        if self._access is None or self._dock_deaths >= self._report.config.run.max_restarts:
            raise death
        self._dock_deaths += 1
        since = time.monotonic()
        values = {"name": death.name, "pid": death.pid, "cause": str(death), "successor": death.name}
        said = f"{death}; another one goes on from what it left in shared memory"
        self._recorder.event("worker_died", values, say=said)
        self._handles[0].stop(timeout_s=0)
        self._handles[0] = dock = self._dock_of(adopt=self._access)
        try:
            dock.wait_ready(START_S)
            self._access = self._find_dock()
        except ProcessDied as second:
            _check_own(second, dock)
            self._replace_dock(second)
            return
        except RunError as error:
            raise death from error
        seconds = round(time.monotonic() - since, 3)
        said = f"{dock.name} serves again, after {seconds:.1f} s"
        self._recorder.event("worker_replaced", {"name": dock.name, "pid": dock.pid, "after_s": seconds}, say=said)

    def _aides_of_dock(self) -> list[Callable[[DockAccess], Aide]]:
        """What helps the dock: a warehouse on each other node, and the controllers that the recipe names."""
        if self._report.config.placement.runtime == "inline":
            return []
        who = self._runtime, self._report
        warehouses = [partial(warehouse_aide, *who, self._run_id, node) for node in self._runtime.nodes()[1:]]
        return [*warehouses, *(partial(controller_aide, *who, stage) for stage in self._report.config.dock.controllers)]

    def _find_dock(self) -> DockAccess:
        return self._handles[0].call("access", timeout_s=START_S)

    def _all_handles(self) -> list[Handle]:
        return [*(process for handle in self._handles for process in members(handle)), *self._aides.handles]

    def _join(self, seat: _Seat) -> None:
        """Take a successor through what it needs before it serves."""
        while seat.joining is not None and seat.joining.done():
            try:
                seat.joining.result(COMMAND_S)
            except ProcessDied as death:
                if death.name == self._handles[0].name and self._access is not None:
                    # It asked a dock that was gone.
                    name, pid = seat.handle.name, seat.handle.pid
                    self._replace(ProcessDied(f"process {name!r} could not start: {death}", name, pid))
                else:
                    _check_own(death, seat.handle)
                return
            seat.joining = seat.steps.pop(0)() if seat.steps else None
            if seat.joining is None:
                self._serve(seat)

    def _serve(self, seat: _Seat) -> None:
        # Again, since a last message of the dead process may have come after it was retired.
        self.dock.retire(seat.predecessor)
        if seat.samples:
            seat.handle.submit("announce_weights", self._ready)
        seconds = round(time.monotonic() - seat.since, 3)
        said = f"{seat.handle.name} serves in the place of {seat.predecessor}, after {seconds:.1f} s"
        values = {"name": seat.handle.name, "pid": seat.handle.pid, "after_s": seconds}
        self._recorder.event("worker_replaced", values, say=said)


def _check_own(death: ProcessDied, worker: Handle) -> None:
    """Raise a death unless it is that of `worker` itself, of which the runtime's next poll tells."""
    if not _is_of(death, worker):
        raise death


def _is_of(death: ProcessDied, worker: Handle) -> bool:
    """Whether it is that of a worker, or of one of its ranks."""
    return any(death.name == process.name for process in members(worker))
