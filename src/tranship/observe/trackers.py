"""Where metrics go: the Tracker protocol, its table, and the file of JSON lines. Each other one has its own file."""

from __future__ import annotations

import importlib.util
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tranship.lookup import resolve
from tranship.observe.jsonl import JsonlWriter, finite, keep_rows
from tranship.types import UserError


class Tracker(Protocol):
    """Takes flat dicts of numbers. Made by `Class(run_dir, resumed_step, *, project, config)`.

    resumed_step: None starts afresh; a step goes on after it, in the same run of the tracker. What an earlier process
    logged for later steps is no longer seen, or, where a store can only append (W&B, MLflow, trackio), the value that
    is logged anew stands after it at the same step. project: what runs are filed under. config: the resolved
    configuration, nested, JSON values.
    """

    def log(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Keep the metrics of one moment. kind: "step", or "before", "during", "after" for a validation. What was
        logged is on disk, or sent, when the process is killed two seconds later."""
        ...

    def close(self) -> None:
        """Write out what is left. Nothing is logged afterwards."""
        ...


TRACKERS: Mapping[str, str] = {
    "jsonl": "tranship.observe.trackers:JsonlTracker",
    "tensorboard": "tranship.observe.tensorboard_tracker:TensorBoardTracker",
    "wandb": "tranship.observe.wandb_tracker:WandbTracker",
    "mlflow": "tranship.observe.mlflow_tracker:MlflowTracker",
    "trackio": "tranship.observe.trackio_tracker:TrackioTracker",
}

# What a tracker imports and the project itself does not need: the extra of the same name brings it.
_NEEDS: Mapping[str, Sequence[str]] = {
    "wandb": ("wandb",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
    "trackio": ("trackio",),
}


def check_trackers(names: Sequence[str]) -> None:
    """Raise UserError if a name stands for no tracker (listing the known ones), or for one whose package is missing."""
    for name in names:
        missing = [package for package in _NEEDS.get(name, ()) if not _installed(package)]
        if missing:
            raise UserError(
                f"observe.trackers: {name} needs {' and '.join(missing)}, which is not installed here: "
                f'pip install "tranship[{name}]", or leave {name} out'
            )
        resolve(name, TRACKERS, "observe.trackers")


def make_tracker(
    name: str, run_dir: Path, resumed_step: int | None, *, project: str, config: Mapping[str, Any]
) -> Tracker:
    """The tracker that the setting names. Raises UserError as `check_trackers`, and where it cannot start (no login,
    a server that does not answer)."""
    check_trackers([name])
    factory = resolve(name, TRACKERS, "observe.trackers")
    try:
        return factory(run_dir, resumed_step, project=project, config=dict(config))
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"observe.trackers: {name} cannot start ({first_line(error)}): see to it, or leave {name} out"
        ) from error


def first_line(error: Exception) -> str:
    """`PermissionError: log in first`: what kind of error it is, and the first line of what it says."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def new_id() -> str:
    """12 random hexadecimal digits."""
    return uuid.uuid4().hex[:12]


def kept_id(folder: Path, resumed_step: int | None, make: Callable[[], str] = new_id) -> str:
    """The id under which a tracker knows this run: that of FOLDER/run_id when going on, else a made one, put there."""
    path = folder / "run_id"
    if resumed_step is not None and path.is_file():
        return path.read_text().strip()
    folder.mkdir(parents=True, exist_ok=True)
    run_id = make()
    path.write_text(run_id + "\n")
    return run_id


def _installed(package: str) -> bool:
    """Whether the package can be imported. A folder of that name alone (W&B leaves `wandb/`) is no package."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


class JsonlTracker:
    """`metrics.jsonl`: a line per step or validation with `kind`, `step`, `time` (unix seconds) and the metrics.

    The configuration stands beside it, in config.yaml.
    """

    def __init__(self, run_dir: Path, resumed_step: int | None, *, project: str, config: Mapping[str, Any]) -> None:
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
