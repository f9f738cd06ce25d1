"""Every tracker of the table: what was logged can be read back, at once, and once, also after a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from tranship.lookup import resolve
from tranship.observe.jsonl import read_jsonl
from tranship.observe.trackers import TRACKERS, Tracker, make_tracker
from tranship.types import UserError


def read_back(name: str, run_dir: Path) -> dict[str, list[tuple[int, float]]]:
    """Metric -> (step, value) in the order of the steps, as a user of the tracker would see it."""
    found: dict[str, list[tuple[int, float]]] = {}
    if name == "jsonl":
        for row in read_jsonl(run_dir / "metrics.jsonl"):
            for metric, value in row.items():
                if metric not in ("kind", "step", "time"):
                    found.setdefault(metric, []).append((row["step"], value))
        return found
    assert name == "tensorboard", f"say here how {name} is read back"
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    for metric in events.Tags()["scalars"]:
        found[metric] = [(event.step, event.value) for event in events.Scalars(metric)]
    return found


@pytest.fixture(params=sorted(TRACKERS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_what_was_logged_is_read_back_before_close(name: str, tmp_path: Path) -> None:
    tracker: Tracker = make_tracker(name, tmp_path, None)
    tracker.log("before", 0, {"val/score": 0.125})
    tracker.log("step", 1, {"critic/score/mean": 0.5, "groups/num": 8})
    tracker.log("step", 2, {"critic/score/mean": 0.75, "groups/num": 8})
    found = read_back(name, tmp_path)
    tracker.close()
    assert found["val/score"] == [(0, 0.125)]
    assert found["critic/score/mean"] == [(1, 0.5), (2, 0.75)]
    assert found["groups/num"] == [(1, 8), (2, 8)]
    assert read_back(name, tmp_path) == found


def test_a_resumed_run_shows_each_step_once(name: str, tmp_path: Path) -> None:
    tracker = make_tracker(name, tmp_path, None)
    for step in (1, 2, 3):
        tracker.log("step", step, {"x": float(step)})
    tracker.close()
    again = make_tracker(name, tmp_path, 2)
    for step in (3, 4):
        again.log("step", step, {"x": 10.0 * step})
    again.close()
    assert read_back(name, tmp_path)["x"] == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]


def test_a_new_run_does_not_show_the_old_one(name: str, tmp_path: Path) -> None:
    tracker = make_tracker(name, tmp_path, None)
    tracker.log("step", 1, {"x": 1.0})
    tracker.close()
    again = make_tracker(name, tmp_path, None)
    again.log("step", 1, {"x": 5.0})
    again.close()
    assert read_back(name, tmp_path)["x"] == [(1, 5.0)]


def test_a_number_that_is_not_finite_does_not_stop_the_run(name: str, tmp_path: Path) -> None:
    tracker = make_tracker(name, tmp_path, None)
    tracker.log("step", 1, {"x": float("nan"), "y": float("inf"), "z": 1.0})
    tracker.close()
    assert read_back(name, tmp_path)["z"] == [(1, 1.0)]


def test_every_entry_resolves_and_an_unknown_one_is_named(tmp_path: Path) -> None:
    for entry in TRACKERS:
        assert callable(resolve(entry, TRACKERS, "observe.trackers"))
    with pytest.raises(UserError, match="observe\\.trackers: 'wandbb' is not known; use one of: jsonl, tensorboard"):
        make_tracker("wandbb", tmp_path, None)


def test_tensorboard_needs_no_torch() -> None:
    import subprocess
    import sys

    program = "import sys, tranship.observe.tensorboard_tracker as t; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
