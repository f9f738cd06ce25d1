"""Metrics to trackio: a local store that `trackio show` draws. Needs the extra `trackio`."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tranship.observe.trackers import kept_id


class TrackioTracker:
    """A trackio run in RUN/trackio, or in TRACKIO_DIR where that is set; read once, when trackio is first imported.

    It is named after the run's folder and the id in RUN/trackio/run_id; a resumed run goes on under that name.
    """

    def __init__(self, run_dir: Path, resumed_step: int | None, *, project: str, config: Mapping[str, Any]) -> None:
        folder = run_dir.resolve() / "trackio"
        os.environ.setdefault("TRACKIO_DIR", str(folder))
        name = f"{run_dir.resolve().name}-{kept_id(folder, resumed_step)}"
        import trackio

        # It prints instructions, which would run through the live view.
        with contextlib.redirect_stdout(io.StringIO()):
            self._run = trackio.init(
                project=project,
                name=name,
                config=dict(config),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def log(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """One row at `step`; the kind shows in the names (val/...)."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Write out what its thread still holds."""
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()
