"""Metrics to MLflow: the server of MLFLOW_TRACKING_URI, or a SQLite file in the run's folder. Extra: `mlflow`."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tranship.observe.trackers import kept_id

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

# What MLflow takes in one call, and how long values and names may be.
_PARAMS_PER_CALL = 100
_METRICS_PER_CALL = 500
_VALUE_LENGTH = 5000
_NAME_LENGTH = 250
_FORBIDDEN = re.compile(r"[^\w\-. :/]")
# A server that is gone must not hold up training for minutes, and a run reports to nobody else; set ones win.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


class MlflowTracker:
    """One MLflow run in the experiment `project`. Its id is in RUN/mlflow/run_id; a resumed run goes on under it.

    Without MLFLOW_TRACKING_URI the store is RUN/mlflow/mlflow.db (`mlflow ui --backend-store-uri sqlite:///...`). The
    configuration becomes parameters, which MLflow never changes: values that a resumed run changed are tags,
    `resumed.<key>`. Characters that MLflow does not allow in names become `_` (`@` becomes `_at_`); numbers that are
    not finite are left out, since MLflow would show infinity as 1.8e308.
    """

    def __init__(self, run_dir: Path, resumed_step: int | None, *, project: str, config: Mapping[str, Any]) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from mlflow.tracking import MlflowClient

        folder = run_dir.resolve() / "mlflow"
        folder.mkdir(parents=True, exist_ok=True)
        server = os.environ.get("MLFLOW_TRACKING_URI")
        if not server:
            # Its lines about the tables of a new file are of no use here.
            logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        self._client = MlflowClient(tracking_uri=server or f"sqlite:///{folder / 'mlflow.db'}")
        experiment = _experiment(self._client, project, None if server else (folder / "artifacts").as_uri())
        self._run_id = kept_id(
            folder,
            resumed_step,
            lambda: self._client.create_run(experiment, run_name=run_dir.resolve().name).info.run_id,
        )
        self._client.update_run(self._run_id, status="RUNNING")
        self._log_config(config)

    def log(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """One point per finite metric, at `step`; the kind shows in the names (val/...)."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        points = [
            Metric(_name(name), float(value), now, step) for name, value in metrics.items() if math.isfinite(value)
        ]
        for start in range(0, len(points), _METRICS_PER_CALL):
            self._client.log_batch(self._run_id, metrics=points[start : start + _METRICS_PER_CALL])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._run_id)

    def _log_config(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param, RunTag

        known = self._client.get_run(self._run_id).data.params
        flat = {_name(name): value[:_VALUE_LENGTH] for name, value in _flat(config)}
        params = [Param(name, value) for name, value in flat.items() if name not in known]
        changed = [
            RunTag(f"resumed.{name}"[:_NAME_LENGTH], value)
            for name, value in flat.items()
            if known.get(name, value) != value
        ]
        for start in range(0, len(params), _PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, params=params[start : start + _PARAMS_PER_CALL])
        for start in range(0, len(changed), _PARAMS_PER_CALL):
            self._client.log_batch(self._run_id, tags=changed[start : start + _PARAMS_PER_CALL])


def _experiment(client: MlflowClient, name: str, artifacts: str | None) -> str:
    """The id of the experiment of this name, which is made if there is none."""
    found = client.get_experiment_by_name(name)
    return found.experiment_id if found else client.create_experiment(name, artifact_location=artifacts)


def _name(name: str) -> str:
    return _FORBIDDEN.sub("_", name.replace("@", "_at_"))[:_NAME_LENGTH]


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """`train.optimizer.learning_rate`, "1e-06": each value that is no dictionary, in JSON (strings as they are)."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)
