"""A report says medians with their range, and never a number for what was not measured."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tranship.bench.report import Bar, Report


@pytest.fixture
def report() -> Report:
    made = Report("a benchmark", {"vs_loop": Bar("at least", 3.0), "wait": Bar("at most", 0.1)})
    made.add("vs_loop", [2.0, 4.0, 3.5])
    made.add("wait", [0.2])
    made.add_missing("vs_peer", "the peer is not there")
    return made


def test_json_is_flat_with_median_range_and_machine(report: Report, tmp_path: Path) -> None:
    report.write(tmp_path / "out.json")
    values = json.loads((tmp_path / "out.json").read_text())
    assert (values["vs_loop"], values["vs_loop_min"], values["vs_loop_max"]) == (3.5, 2.0, 4.0)
    assert values["wait"] == 0.2
    assert values["vs_peer"] is None
    assert values["not_measured"] == {"vs_peer": "the peer is not there"}
    assert values["repeats"] == 3
    assert values["machine"]["cores"] >= 1
    assert values["versions"]["torch"]


def test_the_table_says_whether_a_bar_holds(report: Report) -> None:
    out = io.StringIO()
    report.print(Console(file=out, width=120))
    lines = out.getvalue().splitlines()
    assert any("vs_loop" in line and "at least 3: yes" in line for line in lines)
    assert any("wait" in line and "at most 0.1: no" in line for line in lines)
    assert any("vs_peer" in line and "not measured" in line for line in lines)
    assert "vs_peer: not measured: the peer is not there" in lines


def test_a_bar_has_a_side() -> None:
    assert Bar("at least", 2.0).holds(2.0)
    assert not Bar("at least", 2.0).holds(1.9)
    assert Bar("at most", 2.0).holds(2.0)
    assert not Bar("at most", 2.0).holds(2.1)
