"""What the tests of whole runs share."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Return once a condition holds; fail naming it after the limit."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout_s} s for {what}")
        time.sleep(0.05)


TAG = "TRANSHIP_TEST_TAG"


def tagged(tag: object) -> dict[int, str]:
    """Living processes whose environment carries the tag, wherever they hang in the tree, and their command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                carries = f"{TAG}={tag}".encode() in (entry / "environ").read_bytes().split(b"\0")
                zombie = "\nState:\tZ" in (entry / "status").read_text()
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if carries and not zombie:
                found[int(entry.name)] = command
    return found
