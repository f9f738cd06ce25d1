"""How runs end early: Ctrl-C, a kill, a full disk, a folder in use. Nothing is lost, nothing is left behind."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from flow_helpers import TAG, read_jsonl, tagged, wait_until

Recipe = Callable[..., dict[str, Any]]
SLOW = f"{Path(__file__).parent / 'rewards_for_tests.py'}:slow"
RUNTIMES = {
    "inline": {},
    "ray": {"placement__runtime": "ray", "placement__layout": "split"},
}


def _write(tmp_path: Path, values: dict[str, Any]) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def _start(recipe: Path, **popen: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(Path(sys.executable).parent / "tranship"), "train", str(recipe)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, TAG: str(recipe)},
        **popen,
    )


def _steps(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return (
        sum('"kind": "step"' in line or '"kind":"step"' in line for line in path.read_text().splitlines())
        if path.exists()
        else 0
    )


@pytest.mark.slow
@pytest.mark.parametrize("changes", RUNTIMES.values(), ids=RUNTIMES.keys())
def test_ctrl_c_saves_the_last_step_and_leaves_no_process(
    recipe: Recipe, tmp_path: Path, changes: dict[str, Any]
) -> None:
    path = _write(tmp_path, recipe(train__steps=1000, reward__function=SLOW, **changes))
    run = _start(path)
    try:
        wait_until(lambda: _steps(tmp_path / "run") >= 2, "two steps", 90)
        start = time.monotonic()
        run.send_signal(signal.SIGINT)
        output, _ = run.communicate(timeout=30)
        assert time.monotonic() - start < 10, output
        assert run.returncode == 130, output
    finally:
        run.kill()
    wait_until(lambda: not tagged(path), f"processes {tagged(path)} to end", 5)
    done = [row["step"] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "step"]
    state = json.loads((tmp_path / "run" / "checkpoints" / f"step-{done[-1]:06d}" / "state.json").read_text())
    assert state["version"] == done[-1] >= 2
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "stopped"


@pytest.mark.slow
@pytest.mark.parametrize("changes", RUNTIMES.values(), ids=RUNTIMES.keys())
def test_killing_the_driver_leaves_no_process(recipe: Recipe, tmp_path: Path, changes: dict[str, Any]) -> None:
    path = _write(tmp_path, recipe(train__steps=1000, reward__function=SLOW, **changes))
    run = _start(path)
    try:
        wait_until(lambda: _steps(tmp_path / "run") >= 1, "a step", 90)
    finally:
        run.kill()
        run.wait()
    wait_until(lambda: not tagged(path), f"processes {tagged(path)} to end", 15)


def test_a_full_disk_at_checkpoint_time_leaves_the_last_good_one(recipe: Recipe, tmp_path: Path) -> None:
    ok = _write(tmp_path, recipe(train__steps=1))
    assert _start(ok).wait(timeout=120) == 0
    path = _write(tmp_path, recipe(train__steps=3, run__resume="auto", checkpoint__every_steps=1))
    # A limit on the size of files stands in for a full disk: a real write fails in the middle of the weights.
    limit = 200_000
    run = _start(path, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    output, _ = run.communicate(timeout=120)
    assert run.returncode == 1, output
    assert "checkpoint of step 2 could not be written" in output
    assert "the last good checkpoint is" in output
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step-000001"
    assert (tmp_path / "run" / "checkpoints" / "step-000001" / "manifest.json").is_file()
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


def test_a_folder_in_use_is_refused_at_once(recipe: Recipe, tmp_path: Path) -> None:
    path = _write(tmp_path, recipe(train__steps=1000, reward__function=SLOW))
    first = _start(path)
    try:
        wait_until(lambda: _steps(tmp_path / "run") >= 1, "a step", 90)
        second = _start(path)
        output, _ = second.communicate(timeout=60)
        assert second.returncode == 2
        assert f"is in use by another run (process {first.pid})" in output
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()
