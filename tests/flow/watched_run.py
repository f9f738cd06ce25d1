"""A run in a process of its own, seen from outside: what it recorded, its processes, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import yaml
from flow_helpers import TAG, read_jsonl, tagged, wait_until
from safetensors.numpy import load_file


class WatchedRun:
    """`tranship train` of a recipe. Leaving the context ends it, and checks that none of its processes is left."""

    def __init__(self, recipe: dict[str, Any], folder: Path) -> None:
        self.dir = Path(recipe["run"]["dir"])
        self._path = folder / f"{self.dir.name}.yaml"
        self._path.write_text(yaml.safe_dump(recipe))
        self._log = folder / f"{self.dir.name}.log"
        self._tag = str(self._path)

    def __enter__(self) -> WatchedRun:
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(Path(sys.executable).parent / "tranship"), "train", str(self._path)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, TAG: self._tag},
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        if error is not None:
            error.add_note(self.output()[-3000:])
        else:
            wait_until(lambda: not tagged(self._tag), f"processes {tagged(self._tag)} to end", 20)

    def output(self) -> str:
        """What it has printed."""
        return self._log.read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Its events of a kind."""
        return [row for row in self._rows("events.jsonl") if row["kind"] == kind]

    def steps(self) -> list[dict[str, Any]]:
        """The metrics of its steps."""
        return [row for row in self._rows("metrics.jsonl") if row["kind"] == "step"]

    def wait_for_steps(self, count: int, timeout_s: float = 90) -> None:
        """Return once so many steps are recorded."""
        self._wait(lambda: len(self.steps()) >= count, f"{count} steps", timeout_s)

    def wait_for(self, kind: str, count: int = 1, timeout_s: float = 60) -> dict[str, Any]:
        """The event number `count` of a kind."""
        self._wait(lambda: len(self.events(kind)) >= count, f"event {kind} number {count}", timeout_s)
        return self.events(kind)[count - 1]

    def pids(self) -> dict[str, int]:
        """The processes that it hosts, by name."""
        found = dict(self.events("processes")[-1]["pids"])
        return found | {row["name"]: row["pid"] for row in self.events("worker_replaced")}

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to one of its processes."""
        os.kill(self.pids()[name], number)

    def end(self, timeout_s: float = 120) -> int:
        """The exit code, once it has ended by itself."""
        return self._process.wait(timeout=timeout_s)

    def _wait(self, condition: Any, what: str, timeout_s: float) -> None:
        wait_until(lambda: condition() or self._process.poll() is not None, what, timeout_s)
        assert condition(), f"the run ended with {self._process.returncode} before: {what}"

    def _rows(self, name: str) -> list[dict[str, Any]]:
        path = self.dir / name
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def weights_of(run_dir: Path) -> dict[str, bytes]:
    """The trained weights of a run that has ended, bit for bit."""
    tensors: dict[str, np.ndarray] = load_file(run_dir / "model" / "model.safetensors")
    return {name: tensor.tobytes() for name, tensor in tensors.items()}


def check_whole(run_dir: Path, steps: int) -> dict[str, Any]:
    """The ledger of a run that has ended, after checks: complete, balanced, nothing lost, nothing twice."""
    summary = json.loads((run_dir / "summary.json").read_text())
    ledger = summary["ledger"]
    assert summary["status"] == "completed"
    assert ledger["admitted"] == ledger["trained"] + sum(ledger["dropped"].values())
    assert ledger["in_flight"] == 0
    rows = [row for row in read_jsonl(run_dir / "metrics.jsonl") if row["kind"] == "step"]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    seen = [(row["group_id"], row["sample_index"]) for row in read_jsonl(run_dir / "samples.jsonl")]
    assert len(seen) == len(set(seen)) == ledger["admitted"] * 4
    return ledger
