"""torch's profiler around chosen steps of a worker: a trace to look at, and a table of what took the time."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

_TABLE_ROWS = 40


class Profiler:
    """Records the steps of `steps`, each from `begin` to `end`, in the thread that calls both.

    Writes RUN/profile/step-N-WORKER.json.gz (Chrome's trace format: open it in ui.perfetto.dev) and
    RUN/profile/step-N-WORKER.txt (operators by their own time, most first). Recording slows a step down, and holds its
    trace in memory until the end. torch is imported at the first chosen step.
    """

    def __init__(self, run_dir: Path, worker_name: str, steps: Collection[int]) -> None:
        self._folder = run_dir / "profile"
        self._worker_name = worker_name.replace("/", "-")
        self._steps = frozenset(steps)
        self._step: int | None = None
        self._profile: Any = None

    def begin(self, step: int) -> None:
        """Start recording if the step is a chosen one. A step that is being recorded is ended first, unless it is
        this one."""
        if step == self._step:
            return
        self.close()
        if step not in self._steps:
            return
        import torch.profiler

        self._profile = torch.profiler.profile(activities=torch.profiler.supported_activities())
        self._profile.start()
        self._step = step

    def end(self, step: int) -> Path | None:
        """Write the step's files if it was recorded; the path of the trace, else None."""
        return self.close() if step == self._step else None

    def close(self) -> Path | None:
        """Write the files of the step that is being recorded, if any; the path of its trace."""
        if self._step is None:
            return None
        profile, step = self._profile, self._step
        self._profile = self._step = None
        profile.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"step-{step}-{self._worker_name}"
        path, temporary = self._folder / f"{name}.json.gz", self._folder / f"{name}.part.json.gz"
        profile.export_chrome_trace(str(temporary))
        temporary.replace(path)
        (self._folder / f"{name}.txt").write_text(_table(profile))
        return path


def _table(profile: Any) -> str:
    averages = profile.key_averages()
    on_device = any(event.self_device_time_total > 0 for event in averages)
    sort_by = "self_device_time_total" if on_device else "self_cpu_time_total"
    return averages.table(sort_by=sort_by, row_limit=_TABLE_ROWS, max_name_column_width=80) + "\n"
