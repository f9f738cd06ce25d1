"""A tracker that fails is told once, counted, left alone for a while, and ends no run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tranship.config.schema import ObserveConfig
from tranship.observe.guard import GuardedTracker
from tranship.observe.record import StepRecord
from tranship.observe.recorder import Recorder
from tranship.observe.trackers import JsonlTracker
from tranship.types import UserError


class Shaky:
    """Keeps the steps that it logs; fails at those of `bad`, and at its end if `bad_end`."""

    def __init__(self, bad: tuple[int, ...] = (), *, bad_end: bool = False) -> None:
        self.bad = bad
        self.bad_end = bad_end
        self.asked: list[int] = []

    def log(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        self.asked.append(step)
        if step in self.bad:
            raise ConnectionError(f"no answer at {step}")

    def close(self) -> None:
        if self.bad_end:
            raise OSError("disk full\nin detail")


class Told(list):
    def __call__(self, kind: str, values: Mapping[str, Any], *, say: str = "") -> None:
        self.append((kind, dict(values), say))


def test_faults_are_told_once_counted_and_followed_by_pauses_that_grow() -> None:
    now, told, shaky = [0.0], Told(), Shaky((1, 3, 6))
    guarded = GuardedTracker("shaky", shaky, told, clock=lambda: now[0])
    for step, seconds in ((1, 0.0), (2, 29.0), (3, 30.0), (4, 89.0), (5, 90.0), (6, 91.0), (7, 120.0), (8, 121.0)):
        now[0] = seconds
        guarded.log("step", step, {})
    # Step 3 came after a pause of 30 s and led to one of 60; step 5 went well, so 6 led to 30 again.
    assert shaky.asked == [1, 3, 5, 6, 8]
    assert guarded.lost == 6
    ((kind, values, said),) = told
    assert (kind, values["tracker"], values["step"]) == ("tracker_failed", "shaky", 1)
    assert "shaky failed at step 1 (ConnectionError: no answer at 1)" in said
    guarded.close()
    assert told[1:] == [
        (
            "tracker_incomplete",
            {"tracker": "shaky", "lost": 6},
            "observe.trackers: 6 moments of this run are missing in shaky",
        )
    ]


def test_one_that_works_is_not_talked_about() -> None:
    told, shaky = Told(), Shaky()
    guarded = GuardedTracker("fine", shaky, told)
    guarded.log("step", 1, {})
    guarded.close()
    assert shaky.asked == [1]
    assert told == []


def test_a_fault_at_the_end_is_told() -> None:
    told = Told()
    GuardedTracker("shaky", Shaky(bad_end=True), told).close()
    assert [kind for kind, _, _ in told] == ["tracker_failed"]
    assert "at the end (OSError: disk full)" in told[0][2]


class Broken(Shaky):
    """As a user would bring it: by module and name."""

    def __init__(self, run_dir: Path, resumed_step: int | None, *, project: str, config: dict[str, Any]) -> None:
        super().__init__((1, 2))
        (run_dir / "broken.json").write_text(json.dumps({"project": project, "config": config}))


class Unable:
    def __init__(self, run_dir: Path, resumed_step: int | None, *, project: str, config: dict[str, Any]) -> None:
        raise PermissionError("log in first\nand more")


def recorder_with(run_dir: Path, class_name: str) -> Recorder:
    observe = ObserveConfig(console="off", trackers=(f"{__file__}:{class_name}",), project="mine")
    return Recorder(run_dir, observe, total_steps=2, config={"a": 1})


def test_a_run_goes_on_without_it(tmp_path: Path, step_record: Callable[..., StepRecord]) -> None:
    recorder = recorder_with(tmp_path, "Broken")
    assert json.loads((tmp_path / "broken.json").read_text()) == {"project": "mine", "config": {"a": 1}}
    for step in (1, 2):
        recorder.step(step_record(step))
    recorder.close("finished")
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2]
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in events] == ["start", "tracker_failed", "end", "tracker_incomplete"]
    assert events[-1]["lost"] == 2


def test_one_that_cannot_start_stops_the_run_and_drops_nothing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "old"}\n')
    with pytest.raises(UserError, match=r"cannot start \(PermissionError: log in first\)") as caught:
        recorder_with(tmp_path, "Unable")
    assert "\n" not in str(caught.value)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"kind": "old"}\n'


def test_the_file_of_metrics_is_not_guarded(
    tmp_path: Path, step_record: Callable[..., StepRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError("disk full")

    recorder = Recorder(tmp_path, ObserveConfig(console="off", trackers=()), total_steps=1)
    monkeypatch.setattr(JsonlTracker, "log", full)
    with pytest.raises(OSError, match="disk full"):
        recorder.step(step_record(1))
    recorder.close("failed")
