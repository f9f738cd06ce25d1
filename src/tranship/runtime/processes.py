"""Processes of this node as /proc shows them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path


def _state(pid: int) -> str:
    """The state letter of a process; "X" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "X"


def is_running(pid: int) -> bool:
    """Whether a process runs (one that only waits to be reaped does not)."""
    return _state(pid) not in "ZX"


def is_stopped(pid: int) -> bool:
    """Whether a process is held by SIGSTOP."""
    return _state(pid) == "T"


def descendants(*pids: int) -> set[int]:
    """Children of `pids`, their children, and so on."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found: set[int] = set()
    waiting = list(pids)
    while waiting:
        new = set(children.get(waiting.pop(), ())) - found
        found |= new
        waiting += new
    return found


def end_all(pids: Iterable[int], grace_s: float) -> None:
    """Return once none of the processes runs: those that are left after grace_s are killed."""
    left = [pid for pid in pids if is_running(pid)]
    deadline = time.monotonic() + grace_s
    while left and time.monotonic() < deadline:
        time.sleep(0.01)
        left = [pid for pid in left if is_running(pid)]
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    while any(is_running(pid) for pid in left) and time.monotonic() < deadline + 5.0:
        time.sleep(0.01)
