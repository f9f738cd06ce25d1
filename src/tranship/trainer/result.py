"""What a run leaves: its folder, and the summary of it."""

from __future__ import annotations

from collections.abc import Mapping
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


# What a person may want to open, by its name in the run's folder.
_LEFT = {
    "samples": "samples.jsonl",
    "held-out": "val_samples.jsonl",
    "metrics": "metrics.jsonl",
    "curve": "curve.png",
    "model": "model",
    "summary": "summary.json",
}
_SCORES = {"sampled": "val", "greedy": "val_greedy", "well-formed": "val_well_formed"}


def result_lines(run_dir: Path, summary: Mapping[str, Any]) -> list[str]:
    """The end of a run for people: scores before and after, speed, and where to look."""
    lines = []
    for name, key in _SCORES.items():
        before, after = summary.get(f"{key}_before"), summary.get(f"{key}_after")
        if before is not None and after is not None:
            lines.append(f"held-out, {name}: {before:.1%} before, {after:.1%} after")
    if summary["steps"] and not summary.get("steps_with_update", 1):
        lines.append(
            "nothing was learned: no step had a sample that tells more than another (see groups/* and samples/* in "
            "metrics.jsonl), and the weights are as they were"
        )
    seconds, speed = summary["train_seconds"], summary["tokens_per_s"]
    lines.append(f"{summary['steps']} steps in {seconds:.0f} s, {speed:.0f} generated tokens/s")
    lines += [f"{what:9} {run_dir / name}" for what, name in _LEFT.items() if (run_dir / name).exists()]
    return lines
