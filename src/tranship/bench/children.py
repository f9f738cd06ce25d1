"""One side of a benchmark in a process of its own: started, watched for memory and time, its report read."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tranship.types import RunError

_SAMPLE_S = 0.1
_TREE_S = 1.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ChildReport:
    """values: what the child wrote. started_at: unix seconds of the command. peak_bytes: the largest sum of resident
    memory over the child and its descendants, looked at ten times a second."""

    values: dict[str, Any]
    started_at: float
    peak_bytes: int


def run_child(
    command: Sequence[str], spec: Mapping[str, Any], folder: Path, limit_s: float, env: Mapping[str, str] | None = None
) -> ChildReport:
    """Run `command SPEC_FILE` in a new session; it reads `spec` and writes its report to spec["report"].

    Raises RunError with the last lines of the child's output if it fails, says nothing, or takes longer than limit_s.
    """
    folder.mkdir(parents=True, exist_ok=True)
    spec_file, report_file, log_file = folder / "spec.json", folder / "report.json", folder / "output.log"
    report_file.unlink(missing_ok=True)
    spec_file.write_text(json.dumps({**spec, "report": str(report_file), "folder": str(folder)}))
    started_at = time.time()
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [*command, str(spec_file)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_die_with_parent,
            env={**os.environ, **(env or {})},
        )
        try:
            peak_bytes = _watch(process, time.monotonic() + limit_s)
        finally:
            _end_group(process)
    if process.returncode != 0 or not report_file.exists():
        why = f"took longer than {limit_s:.0f} s" if process.returncode == -signal.SIGKILL else "failed"
        tail = "\n".join(log_file.read_text(errors="replace").splitlines()[-12:])
        raise RunError(f"{Path(command[-1]).name} {why} (exit {process.returncode}):\n{tail}")
    return ChildReport(json.loads(report_file.read_text()), started_at, peak_bytes)


def _die_with_parent() -> None:
    """In the child, before it becomes the command: have the kernel kill it when the benchmark is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _watch(process: subprocess.Popen[bytes], limit: float) -> int:
    """Wait for the end; the peak of the summed resident memory. Kills the group when the limit passes."""
    peak, pids, next_tree = 0, [process.pid], 0.0
    while process.poll() is None:
        now = time.monotonic()
        if now > limit:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            break
        if now >= next_tree:
            pids, next_tree = _tree(process.pid), now + _TREE_S
        peak = max(peak, sum(_resident(pid) for pid in pids))
        try:
            process.wait(_SAMPLE_S)
        except subprocess.TimeoutExpired:
            continue
    return peak


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing of the child's session behind, whatever ended it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def _tree(root: int) -> list[int]:
    """The process and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parent = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, IndexError):
                continue
            children.setdefault(parent, []).append(int(entry))
    found, todo = [], [root]
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += children.get(pid, [])
    return found
