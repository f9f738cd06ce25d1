"""One run, from a configuration to its summary: set up, loop, and an orderly end whatever happens."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tranship.config import Config
from tranship.config.load import dump
from tranship.data.promptset import write_dropped
from tranship.dock import DockClient
from tranship.models.tokenizer import decode_response
from tranship.observe import Recorder, draw_curve, write_summary
from tranship.runtime import ProcessDied, Runtime, start_runtime
from tranship.trainer.checkpoint import Cut, read_latest
from tranship.trainer.coordinator import Coordinator
from tranship.trainer.folder import RunFolder
from tranship.trainer.preflight import Report, preflight
from tranship.trainer.processes import runtime_options
from tranship.trainer.result import Result, Status, result_lines
from tranship.trainer.resume import check_resumable
from tranship.trainer.signals import StopRequest
from tranship.trainer.supervise import COMMAND_S, Supervisor
from tranship.types import RunError

_POLL_S = 0.5


def run(config: Config) -> Result:
    """Train as configured; returns when the run is complete, or was asked to stop by Ctrl-C or SIGTERM.

    Raises UserError before any worker starts if something given is wrong, and RunError when the run cannot go on; the
    last completed step is saved then, if it can be.
    """
    report = preflight(config)
    resume = config.run.resume == "auto"
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder(Path(config.run.dir), resume=resume))
        cut = read_latest(folder.path) if resume else None
        if cut is not None:
            check_resumable(cut, config, report.train.digest)
        (folder.path / "config.yaml").write_text(dump(config))
        write_dropped(folder.path / "dropped.jsonl", report.prompt_sets())
        going = _Run(report, folder.path, resumed_step=cut.state["version"] if cut else None)
        stack.callback(going.close)
        _announce(going.recorder, report, folder, cut)
        return going.go(cut)


def _announce(recorder: Recorder, report: Report, folder: RunFolder, cut: Cut | None) -> None:
    lines = ["configuration:", *(f"  {line}" for line in dump(report.config).splitlines()), *report.lines()]
    if folder.set_aside:
        lines.append(f"an earlier run was set aside: {folder.set_aside}")
    if cut:
        lines.append(f"going on from {cut.folder}")
    recorder.event("configuration", {"lines": lines}, say="\n".join(lines))


class _GoBack(Exception):
    """A process is gone without which the run cannot go on from where it is."""

    def __init__(self, death: ProcessDied) -> None:
        super().__init__(str(death))
        self.death = death


class _Run:
    """The processes of a run and its loop, begun again from the last cut where they cannot be mended."""

    def __init__(self, report: Report, run_dir: Path, *, resumed_step: int | None) -> None:
        self._report = report
        self._config = report.config
        self._run_dir = run_dir
        self.recorder = self._open_recorder(resumed_step)
        self._processes: Supervisor | None = None
        self._started = time.monotonic()

    def close(self) -> None:
        """Close what is open, as a run that has failed."""
        self.recorder.close("failed")

    def go(self, cut: Cut | None) -> Result:
        """Start, loop, end; from the last cut again where a process dies that the loop cannot do without."""
        with ExitStack() as stack:
            runtime = stack.enter_context(start_runtime(self._config.placement.runtime, runtime_options(self._report)))
            stop = stack.enter_context(StopRequest(self._interrupt_inline))
            attempt = 0
            while True:
                try:
                    return self._attempt(runtime, stop, cut, attempt)
                except _GoBack as going_back:
                    attempt += 1
                    cut = self._go_back(going_back.death, attempt)

    def _attempt(self, runtime: Runtime, stop: StopRequest, cut: Cut | None, attempt: int) -> Result:
        self._processes = processes = Supervisor(runtime, self._report, self._run_dir, self.recorder, attempt)
        coordinator: Coordinator | None = None
        try:
            processes.start()
            coordinator = Coordinator(
                self._report,
                self._run_dir,
                processes,
                self.recorder,
                lambda ids: decode_response(self._report.tokenizer, ids),
            )
            coordinator.start(cut)
            self.recorder.event("training", {"after_s": time.monotonic() - self._started})
            self._loop(processes, coordinator, stop)
            return self._end(processes, "stopped" if stop.requested else "completed")
        except Exception as error:
            cause = processes.cause(error)
            if isinstance(cause, ProcessDied) and attempt < self._config.run.max_restarts and not stop.requested:
                processes.end()
                raise _GoBack(cause) from error
            if coordinator is not None:
                self._fail(coordinator, cause)
            if cause is error:
                raise
            raise cause from error

    def _go_back(self, death: ProcessDied, attempt: int) -> Cut | None:
        """Drop what was recorded beyond the last cut, which is returned; None: the run begins anew."""
        cut = read_latest(self._run_dir)
        step = cut.state["version"] if cut else 0
        where = f"step {step}" if cut else "the beginning, since there is no checkpoint (checkpoint.every_steps)"
        again = f"restart {attempt} of at most {self._config.run.max_restarts}"
        values = {"cause": str(death), "name": death.name, "pid": death.pid, "step": step, "number": attempt}
        self.recorder.event("going_back", values, say=f"{death}; going back to {where} ({again})")
        self.recorder.close("interrupted")
        self.recorder = self._open_recorder(step)
        return cut

    def _open_recorder(self, resumed_step: int | None) -> Recorder:
        return Recorder(
            self._run_dir,
            self._config.observe,
            config=self._config.model_dump(mode="json"),
            total_steps=self._config.train.steps,
            resumed_step=resumed_step,
        )

    def _loop(self, processes: Supervisor, coordinator: Coordinator, stop: StopRequest) -> None:
        while not coordinator.done and not stop.requested:
            processes.poll(min(_POLL_S, self._config.dock.lease_s / 4))
            coordinator.tick()
        if stop.requested and not coordinator.done:
            self.recorder.event("stopping", {"step": coordinator.version}, say="stopping: saving the last step")
            processes.interrupt()
            coordinator.stop()

    def _interrupt_inline(self) -> None:
        """In one process the work is under this very signal handler, and can be told at once to give up its update."""
        if self._config.placement.runtime == "inline" and self._processes is not None:
            self._processes.interrupt()

    def _fail(self, coordinator: Coordinator, error: Exception) -> None:
        """Save the last completed step where it is known to be whole, which a fault of our own would leave open."""
        saved: Path | None = None
        if isinstance(error, RunError):
            try:
                saved = coordinator.stop()
            except RunError as second:
                self.recorder.event("unsaved", {"reason": str(second)}, say=f"the last step is not saved: {second}")
        if saved is not None:
            self.recorder.event("saved", {"folder": str(saved)}, say=f"saved {saved}: go on with --resume auto")
        self._summarise(None, "failed", reason=f"{type(error).__name__}: {error}")

    def _end(self, processes: Supervisor, status: Status) -> Result:
        if status == "completed" and self._config.run.export:
            processes.trainer.call("export", str(self._run_dir / "model"), timeout_s=COMMAND_S)
        summary = self._summarise(processes.dock, status)
        self.recorder.event("result", {}, say="\n".join(result_lines(self._run_dir, summary)))
        self.recorder.close(status)
        return Result(self._run_dir, status, summary)

    def _summarise(self, dock: DockClient | None, status: Status, reason: str = "") -> dict[str, Any]:
        values = {
            **self.recorder.totals(),
            "status": status,
            "reason": reason,
            "ledger": dock.ledger_counts() if dock else None,
            "run_seconds": time.monotonic() - self._started,
        }
        write_summary(self._run_dir, values)
        draw_curve(self._run_dir)
        return values
