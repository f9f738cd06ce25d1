"""What a run leaves: its folder, and the summary of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Status = Literal["completed", "stopped", "failed"]


@dataclass(frozen=True)
class Result:
    """status: "completed", or "stopped" by a signal (a checkpoint of the last completed step is there). summary: as in
    RUN/summary.json."""

    run_dir: Path
    status: Status
    summary: dict[str, Any]
