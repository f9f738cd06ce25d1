"""Everything that a run leaves to look at goes through one Recorder: metrics, events, samples, console, TensorBoard.

Files in the run's folder: metrics.jsonl (a line per step and validation), events.jsonl, samples.jsonl,
val_samples.jsonl, snapshots/, and what the trackers make (tensorboard/, wandb/, ...). A resumed run goes on in the
same files; lines of steps beyond the resumed one are dropped first, so that no step stands twice.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tranship.config.schema import ObserveConfig
from tranship.observe.board import BoardServer
from tranship.observe.console import make_view
from tranship.observe.guard import GuardedTracker
from tranship.observe.jsonl import JsonlWriter, finite, keep_rows, read_jsonl
from tranship.observe.metrics import step_metrics, validation_metrics
from tranship.observe.record import StepRecord, ValidationRecord
from tranship.observe.snapshot import TOKEN_FIELDS, SnapshotWatch
from tranship.observe.totals import RunTotals
from tranship.observe.trackers import Tracker, check_trackers, make_tracker


class Recorder:
    """Writes and shows what the coordinator tells it. One per run, used from one thread."""

    def __init__(
        self,
        run_dir: Path,
        observe: ObserveConfig,
        *,
        total_steps: int,
        resumed_step: int | None = None,
        terminal: Console | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """resumed_step: the last step that counts (0: before the first), or None to start afresh and drop what an
        earlier run left in the files. terminal: where to show; None: standard output. config: the whole resolved
        configuration (JSON values), for the trackers."""
        run_dir.mkdir(parents=True, exist_ok=True)
        self.run_dir = run_dir
        self._totals = RunTotals()
        self._limit = observe.samples_per_step
        # First, so that a missing package or a port in use stops the run before anything is dropped.
        check_trackers(observe.trackers)
        self._board = BoardServer(run_dir, observe.tensorboard_port) if observe.tensorboard_port else None
        try:
            self._trackers = self._make_trackers(observe, resumed_step, config or {})
        except BaseException:
            if self._board:
                self._board.close()
            raise
        _cut(run_dir, resumed_step)
        for row in read_jsonl(run_dir / "metrics.jsonl"):
            self._totals.add(row["kind"], row["step"], row)
        self._snapshots = SnapshotWatch(observe, run_dir)
        self._record: StepRecord | None = None
        self._events = JsonlWriter(run_dir / "events.jsonl")
        self._samples = JsonlWriter(run_dir / "samples.jsonl")
        self._val_samples = JsonlWriter(run_dir / "val_samples.jsonl")
        self._view = make_view(observe.console, terminal, total_steps, run_dir.resolve().name)
        self._closed = False
        self.event("start" if resumed_step is None else "resume", {"step": resumed_step or 0})
        if self._board:
            self.event("tensorboard", {"url": self._board.url}, say=f"TensorBoard: {self._board.url}")

    @property
    def tensorboard_url(self) -> str | None:
        """Where the TensorBoard server of this run answers; None without one."""
        return self._board.url if self._board else None

    def validated(self, when: str) -> dict[str, Any] | None:
        """The metrics (and `step`) of this run's last validation of a kind, also by an earlier process; or None."""
        return self._totals.validations.get(when)

    def step(self, record: StepRecord) -> dict[str, float]:
        """Log one trained batch; its flat metrics. `samples` of the same step comes next, if there are any."""
        metrics = step_metrics(record)
        self._record = record
        self._log("step", record.step, metrics)
        self._view.step(record, metrics)
        return metrics

    def validation(self, record: ValidationRecord) -> dict[str, float]:
        """Log one validation; its flat metrics."""
        metrics = validation_metrics(record)
        self._log(record.when, record.step, metrics)
        self._view.validation(record)
        return metrics

    def event(self, kind: str, values: Mapping[str, Any], *, say: str = "") -> None:
        """Append to events.jsonl (JSON values); `say` is shown on the console as well."""
        self._events.write({"time": round(time.time(), 3), "kind": kind} | dict(values))
        if say:
            self._view.say(say)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append a step's samples to samples.jsonl: the first `samples_per_step` (-1: all), and every invalid one.

        If something has gone wrong at the step (see `SnapshotWatch`), all of it goes to RUN/snapshots/step-N too, with
        an event `snapshot` that is shown.

        Rows have JSON values: input, output, gts, score (the names of verl's rollout dump, with step; score is None
        unless status is "scored"), group_id, sample_index, attempt, status, reason, finish_reason, num_tokens,
        advantage, logprob_mean (of the sampler), versions ([oldest, newest] of its tokens), extra (further numbers
        of the reward); and, for snapshots alone, arrays [T]: token_ids, logprobs (of the sampler), ref_logprobs,
        response_mask, advantages.
        """
        for index, row in enumerate(rows):
            if self._limit < 0 or index < self._limit or row["status"] == "invalid":
                shown = {name: value for name, value in row.items() if name not in TOKEN_FIELDS}
                self._samples.write({"step": step} | finite(shown))
        if self._record is not None and self._record.step == step:
            self._snapshot(self._record, rows)

    def validation_samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append the samples of a validation to val_samples.jsonl: all of them, rows as in `samples`."""
        for row in rows:
            self._val_samples.write({"step": step} | finite(row))

    def totals(self) -> dict[str, Any]:
        """The keys of summary.json that follow from what was logged: steps, val_*, train_seconds, tokens_*, invalid."""
        return self._totals.summary()

    def close(self, status: str) -> None:
        """Show the end, close every file and stop the TensorBoard server. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self.event("end", {"status": status, "step": self._totals.steps})
        self._view.close(status)
        # Trackers first: what they have to say goes into events.jsonl.
        for file in (*self._trackers, self._events, self._samples, self._val_samples):
            file.close()
        if self._board:
            self._board.close()

    def _make_trackers(
        self, observe: ObserveConfig, resumed_step: int | None, config: Mapping[str, Any]
    ) -> list[Tracker]:
        """metrics.jsonl, which must not fail once it is there, and the others, which may."""

        def make(name: str) -> Tracker:
            return make_tracker(name, self.run_dir, resumed_step, project=observe.project, config=config)

        others = dict.fromkeys(name for name in observe.trackers if name != "jsonl")
        # The others first: one that cannot start leaves an older metrics.jsonl as it is.
        guarded: list[Tracker] = [GuardedTracker(name, make(name), self.event) for name in others]
        return [make("jsonl"), *guarded]

    def _snapshot(self, record: StepRecord, rows: Sequence[Mapping[str, Any]]) -> None:
        try:
            snapshot = self._snapshots.look(record, rows)
        except OSError as error:
            # A full disk that holds no snapshot may still hold the run.
            said = f"no snapshot of step {record.step}: {error}"
            self.event("snapshot_failed", {"step": record.step, "reason": str(error)}, say=said)
            return
        if snapshot is not None:
            values = {"step": record.step, "folder": str(snapshot.folder), "reasons": list(snapshot.reasons)}
            said = f"step {record.step}: {'; '.join(snapshot.reasons)}: kept in {snapshot.folder}"
            self.event("snapshot", values, say=said)

    def _log(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        self._totals.add(kind, step, metrics)
        for tracker in self._trackers:
            tracker.log(kind, step, metrics)


def _cut(run_dir: Path, resumed_step: int | None) -> None:
    """Drop the samples of steps that will be done again; events are history and stay, unless the run is a new one."""
    if resumed_step is None:
        for name in ("samples.jsonl", "val_samples.jsonl", "events.jsonl"):
            (run_dir / name).unlink(missing_ok=True)
        shutil.rmtree(run_dir / "snapshots", ignore_errors=True)
        return
    for name in ("samples.jsonl", "val_samples.jsonl"):
        keep_rows(run_dir / name, lambda row: row["step"] <= resumed_step)
    keep_rows(run_dir / "events.jsonl", lambda row: True)  # Only to lose a line that a kill tore.
