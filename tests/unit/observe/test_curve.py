"""The curve is a picture of what metrics.jsonl says; without matplotlib a line says how to get it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tranship.observe.curve import curve_lines, draw_curve
from tranship.observe.jsonl import read_jsonl
from tranship.observe.trackers import JsonlTracker


def write_metrics(run_dir: Path) -> None:
    tracker = JsonlTracker(run_dir, None, project="p", config={})
    tracker.log("before", 0, {"val/score": 0.1, "val/score_greedy": 0.2})
    tracker.log("step", 1, {"critic/score/mean": 0.3})
    tracker.log("step", 2, {"actor/loss": 0.3})  # A step without a scored sample has no point.
    tracker.log("after", 2, {"val/score": 0.7, "val/score_greedy": 0.8})
    tracker.close()


def test_it_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_metrics(tmp_path)
    path = draw_curve(tmp_path)
    assert path is not None
    assert path == tmp_path / "curve.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000
    assert not (tmp_path / "curve.part.png").exists()


def test_the_lines_are_rewards_and_validations(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    lines = curve_lines(list(read_jsonl(tmp_path / "metrics.jsonl")))
    assert lines == [
        ("reward of training samples", "mean score", [1], [0.3]),
        ("validation, sampled", "mean score", [0, 2], [0.1, 0.7]),
        ("validation, greedy", "mean score", [0, 2], [0.2, 0.8]),
    ]


def test_where_nothing_is_scored_the_loss_is_drawn_on_its_own_axis(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tracker = JsonlTracker(tmp_path, None, project="p", config={})
    for step, loss in ((1, 0.7), (2, None), (3, 0.5)):
        tracker.log("step", step, {} if loss is None else {"actor/loss": loss})
    tracker.log("after", 3, {"val/score": 0.25})
    tracker.close()
    assert curve_lines(list(read_jsonl(tmp_path / "metrics.jsonl"))) == [
        ("loss of training samples", "loss", [1, 3], [0.7, 0.5]),
        ("validation, sampled", "mean score", [3], [0.25]),
    ]
    path = draw_curve(tmp_path)
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_it_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_metrics(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said: list[str] = []
    assert draw_curve(tmp_path, said.append) is None
    assert "tranship[plot]" in said[0]


def test_without_a_step_there_is_nothing_to_draw(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    said: list[str] = []
    assert draw_curve(tmp_path, said.append) is None
    assert "no step" in said[0]
