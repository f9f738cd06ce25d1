"""What the tests of whole runs share."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray import cluster_utils

NODE = {"num_cpus": 4, "object_store_memory": 100 << 20, "node_ip_address": "127.0.0.1"}


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


@contextmanager
def ray_nodes(count: int) -> Iterator[Any]:
    """A Ray cluster of nodes of four cores each, all of them on 127.0.0.1, and no driver in this process."""
    # A folder of its own, with a short name: Ray puts sockets into it, and what `auto` finds.
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="t-", dir="/tmp", ignore_cleanup_errors=True) as folder,
    ):
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_TMPDIR", folder)
        (Path(folder) / "ray").mkdir()
        head = {**NODE, "include_dashboard": False, "temp_dir": folder}
        nodes = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        try:
            for _ in range(1, count):
                nodes.add_node(**NODE)
            yield nodes
        finally:
            nodes.shutdown()
