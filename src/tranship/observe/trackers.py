"""Where metrics go: the Tracker protocol, its table, and the file of JSON lines. TensorBoard stands in its own file."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from tranship.lookup import resolve
from tranship.observe.jsonl import JsonlWriter, finite, keep_rows


class Tracker(Protocol):
    """Takes flat dicts of numbers. Made by `Class(run_dir, resumed_step)`: None starts afresh; a step goes on after it,
    and what an earlier process logged for later steps is no longer seen."""

    def log(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of one moment. kind: "step", or "before", "during", "after" for a validation. What was
        logged is on disk, or sent, when the process is killed a second later."""
        ...

    def close(self) -> None:
        """Write out what is left. Nothing is logged afterwards."""
        ...


TRACKERS: Mapping[str, str] = {
    "jsonl": "tranship.observe.trackers:JsonlTracker",
    "tensorboard": "tranship.observe.tensorboard_tracker:TensorBoardTracker",
}


def check_trackers(names: Sequence[str]) -> None:
    """Raise UserError, listing the known ones, if a name stands for no tracker."""
    for name in names:
        resolve(name, TRACKERS, "observe.trackers")


def make_tracker(name: str, run_dir: Path, resumed_step: int | None) -> Tracker:
    """The tracker that the setting names. Raises UserError listing the known ones."""
    return resolve(name, TRACKERS, "observe.trackers")(run_dir, resumed_step)


class JsonlTracker:
    """`metrics.jsonl`: a line per step or validation with `kind`, `step`, `time` (unix seconds) and the metrics."""

    def __init__(self, run_dir: Path, resumed_step: int | None) -> None:
        self._path = run_dir / "metrics.jsonl"
        if resumed_step is None:
            self._path.unlink(missing_ok=True)
        else:
            keep_rows(self._path, lambda row: row["step"] <= resumed_step)
        self._writer = JsonlWriter(self._path)

    def log(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Append the line."""
        self._writer.write({"kind": kind, "step": step, "time": round(time.time(), 3)} | finite(metrics))

    def close(self) -> None:
        """Close the file."""
        self._writer.close()
