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
from tranship.runtime import Handle, Runtime, start_runtime
from tranship.trainer.checkpoint import Cut, read_latest
from tranship.trainer.coordinator import Coordinator
from tranship.trainer.folder import RunFolder
from tranship.trainer.preflight import Report, preflight
from tranship.trainer.processes import runtime_options, start_processes
from tranship.trainer.result import Result, Status, result_lines
from tranship.trainer.resume import check_resumable
from tranship.trainer.signals import StopRequest
from tranship.types import RunError

_POLL_S = 0.5
_COMMAND_S = 3600.0


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
        recorder = Recorder(
            folder.path,
            config.observe,
            config=config.model_dump(mode="json"),
            total_steps=config.train.steps,
            resumed_step=cut.state["version"] if cut else None,
        )
        stack.callback(recorder.close, "failed")
        _announce(recorder, report, folder, cut)
        return _Run(report, folder.path, recorder).go(cut)


def _announce(recorder: Recorder, report: Report, folder: RunFolder, cut: Cut | None) -> None:
    lines = ["configuration:", *(f"  {line}" for line in dump(report.config).splitlines()), *report.lines()]
    if folder.set_aside:
        lines.append(f"an earlier run was set aside: {folder.set_aside}")
    if cut:
        lines.append(f"going on from {cut.folder}")
    recorder.event("configuration", {"lines": lines}, say="\n".join(lines))


class _Run:
    """The processes of a run and its loop."""

    def __init__(self, report: Report, run_dir: Path, recorder: Recorder) -> None:
        self._report = report
        self._config = report.config
        self._run_dir = run_dir
        self._recorder = recorder
        self._workers: list[Handle] = []
        self._started = time.monotonic()

    def go(self, cut: Cut | None) -> Result:
        """Start, loop, end."""
        with ExitStack() as stack:
            runtime = stack.enter_context(start_runtime(self._config.placement.runtime, runtime_options(self._report)))
            stop = stack.enter_context(StopRequest(self._interrupt_inline))
            dock, started = start_processes(runtime, self._report, self._run_dir)
            self._workers += started
            coordinator = Coordinator(
                self._report,
                self._run_dir,
                dock,
                self._workers,
                runtime.events,
                self._recorder,
                lambda ids: decode_response(self._report.tokenizer, ids),
            )
            coordinator.start(cut)
            self._recorder.event("training", {"after_s": time.monotonic() - self._started})
            try:
                self._loop(runtime, coordinator, stop)
            except Exception as error:
                self._fail(coordinator, error)
                raise
            return self._end(coordinator, dock, "stopped" if stop.requested else "completed")

    def _loop(self, runtime: Runtime, coordinator: Coordinator, stop: StopRequest) -> None:
        while not coordinator.done and not stop.requested:
            runtime.poll(_POLL_S)
            coordinator.tick()
        if stop.requested and not coordinator.done:
            self._recorder.event("stopping", {"step": coordinator.version}, say="stopping: saving the last step")
            for worker in self._workers:
                worker.submit("interrupt")
            coordinator.stop()

    def _interrupt_inline(self) -> None:
        """In one process the work is under this very signal handler, and can be told at once to give up its update."""
        if self._config.placement.runtime == "inline":
            for worker in self._workers:
                worker.submit("interrupt")

    def _fail(self, coordinator: Coordinator, error: Exception) -> None:
        """Save the last completed step where it is known to be whole, which a fault of our own would leave open."""
        saved: Path | None = None
        if isinstance(error, RunError):
            try:
                saved = coordinator.stop()
            except RunError as second:
                self._recorder.event("unsaved", {"reason": str(second)}, say=f"the last step is not saved: {second}")
        if saved is not None:
            self._recorder.event("saved", {"folder": str(saved)}, say=f"saved {saved}: go on with --resume auto")
        self._summarise(None, "failed", reason=f"{type(error).__name__}: {error}")

    def _end(self, coordinator: Coordinator, dock: DockClient, status: Status) -> Result:
        if status == "completed" and self._config.run.export:
            self._workers[0].call("export", str(self._run_dir / "model"), timeout_s=_COMMAND_S)
        summary = self._summarise(dock, status)
        self._recorder.event("result", {}, say="\n".join(result_lines(self._run_dir, summary)))
        self._recorder.close(status)
        return Result(self._run_dir, status, summary)

    def _summarise(self, dock: DockClient | None, status: Status, reason: str = "") -> dict[str, Any]:
        values = {
            **self._recorder.totals(),
            "status": status,
            "reason": reason,
            "ledger": dock.ledger_counts() if dock else None,
            "run_seconds": time.monotonic() - self._started,
        }
        write_summary(self._run_dir, values)
        draw_curve(self._run_dir)
        return values
