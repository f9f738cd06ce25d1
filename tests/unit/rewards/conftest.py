"""No test of rewards leaves a process."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


def children() -> set[int]:
    """Processes that this one started and that are not reaped."""
    if Path(f"/proc/self/task/{os.getpid()}/children").exists():
        found = set()
        for path in Path("/proc/self/task").glob("*/children"):
            with contextlib.suppress(OSError):  # A thread has ended meanwhile.
                found |= {int(pid) for pid in path.read_text().split()}
        return found
    listed = subprocess.run(["ps", "-A", "-o", "ppid=,pid=,comm="], capture_output=True, text=True, check=True)
    rows = [line.split() for line in listed.stdout.splitlines()]
    return {int(pid) for parent, pid, name, *_ in rows if parent == str(os.getpid()) and not name.endswith("ps")}


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    before = children()
    yield
    assert children() <= before
