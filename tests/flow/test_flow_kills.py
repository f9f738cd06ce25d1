"""kill -9 of any process of a run at any moment, then the same command again: the result is that of an unkilled run.

TRANSHIP_KILLS and TRANSHIP_KILL_STEPS set how often each run is killed and how long it is (CI: a few and a few).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from flow_helpers import TAG, read_jsonl, tagged, wait_until
from safetensors.numpy import load_file

Recipe = Callable[..., dict[str, Any]]
KILLS = int(os.environ.get("TRANSHIP_KILLS", "3"))
STEPS = int(os.environ.get("TRANSHIP_KILL_STEPS", "6"))
RUNTIMES = {"inline": {}, "ray": {"placement__runtime": "ray", "placement__layout": "split"}}
# Between two kills. Most of a start is loading libraries; later kills find the run at work.
PAUSE_S = {"inline": (0.5, 6.0), "ray": (0.5, 14.0)} if KILLS < 20 else {"inline": (0.3, 4.0), "ray": (0.5, 9.0)}
# A run of this size takes seconds; one that is silent for so long hangs.
HANG_S = 150.0
# Of a run whose driver was killed.
GONE_S = 20.0


@dataclass
class Killer:
    """Runs one recipe until it is complete, and kills one of its processes every now and then."""

    recipe: Path
    draw: random.Random
    kills: int
    pause_s: tuple[float, float]
    output: Path
    killed: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    unguarded: bool = False

    def run(self) -> None:
        """Return when the run has ended by itself."""
        for _ in range(2 * self.kills + 3):
            if self._once() == 0:
                return
        pytest.fail(f"not complete after {self.starts} starts and {self.killed}: {self.output.read_text()[-2000:]}")

    def _once(self) -> int:
        tag = str(self.recipe)
        self.starts += 1
        self.unguarded = False
        with self.output.open("a") as log:
            run = subprocess.Popen(
                [str(Path(sys.executable).parent / "tranship"), "train", tag, "--resume", "auto"],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, TAG: tag},
            )
        end = time.monotonic() + HANG_S
        try:
            while run.poll() is None:
                if sum(self.killed.values()) < self.kills:
                    self._wait(run, self.draw.uniform(*self.pause_s))
                    self._kill_one(run, tag)
                    end = time.monotonic() + HANG_S
                else:
                    self._wait(run, 0.2)
                assert time.monotonic() < end, f"silent for {HANG_S} s after {self.killed}: {tagged(tag)}"
        finally:
            run.kill()
            run.wait()
        # With its guard killed too, what a killed driver leaves is ended by the next start.
        if not self.unguarded or run.returncode == 0:
            wait_until(lambda: not tagged(tag), f"processes {tagged(tag)} to end", GONE_S)
        return run.returncode

    @staticmethod
    def _wait(run: subprocess.Popen[bytes], seconds: float) -> None:
        try:
            run.wait(seconds)
        except subprocess.TimeoutExpired:
            return

    def _kill_one(self, run: subprocess.Popen[bytes], tag: str) -> None:
        living = tagged(tag)
        if run.poll() is not None or not living:
            return
        victim = self.draw.choice(sorted(living))
        try:
            os.kill(victim, signal.SIGKILL)
        except ProcessLookupError:
            return
        self.unguarded = self.unguarded or "guard.py" in living[victim]
        self.killed["driver" if victim == run.pid else _role(living[victim])] += 1


def _role(command: str) -> str:
    for part in ("guard.py", "gcs_server", "raylet", "ray::", "worker_main", "plasma", "log_monitor", "dashboard"):
        if part in command:
            return part.strip(":")
    return " ".join(Path(word).name for word in command.split()[:2])


def _complete(run_dir: Path) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """(summary, metrics of steps, samples) of a run that has ended."""
    summary = json.loads((run_dir / "summary.json").read_text())
    steps = [row for row in read_jsonl(run_dir / "metrics.jsonl") if row["kind"] == "step"]
    return summary, steps, read_jsonl(run_dir / "samples.jsonl")


@pytest.mark.slow
@pytest.mark.timeout(400 + 60 * KILLS)
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_run_that_is_killed_again_and_again_ends_as_one_that_is_not(
    recipe: Recipe, tmp_path: Path, runtime: str
) -> None:
    common = {"train__steps": STEPS, "run__export": True, "checkpoint__every_steps": 1, **RUNTIMES[runtime]}
    common |= {"validation__every_steps": 2, "validation__before_training": True}
    calm = tmp_path / "calm.yaml"
    calm.write_text(yaml.safe_dump(recipe(run__dir=str(tmp_path / "calm"), **common)))
    Killer(calm, random.Random(0), 0, (0, 0), tmp_path / "calm.log").run()
    stormy = tmp_path / "stormy.yaml"
    stormy.write_text(yaml.safe_dump(recipe(run__dir=str(tmp_path / "stormy"), **common)))
    killer = Killer(stormy, random.Random(KILLS), KILLS, PAUSE_S[runtime], tmp_path / "stormy.log")
    killer.run()
    print(f"{runtime}: killed {dict(killer.killed)} in {killer.starts} starts")
    assert 1 <= sum(killer.killed.values()) <= KILLS, killer.killed

    summary, steps, samples = _complete(tmp_path / "stormy")
    expected, _, expected_samples = _complete(tmp_path / "calm")
    ledger = summary["ledger"]
    assert ledger["admitted"] == ledger["trained"] + sum(ledger["dropped"].values()) + ledger["in_flight"]
    # A validation that was recorded before a kill is not made again, and its groups were counted after the cut.
    assert {key: ledger[key] for key in ("admitted", "trained", "dropped", "in_flight")} == {
        key: expected["ledger"][key] for key in ("admitted", "trained", "dropped", "in_flight")
    }
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    seen = Counter((row["group_id"], row["sample_index"]) for row in samples)
    assert max(seen.values()) == 1
    assert seen.keys() == {(row["group_id"], row["sample_index"]) for row in expected_samples}
    validated = [(row["kind"], row["step"]) for row in read_jsonl(tmp_path / "stormy" / "metrics.jsonl")]
    assert validated == [(row["kind"], row["step"]) for row in read_jsonl(tmp_path / "calm" / "metrics.jsonl")]
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("stormy", "calm"))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.tobytes() == theirs[name].tobytes(), name
