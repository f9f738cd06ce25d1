"""Figures of whole runs: from fake rounds, and from two real sides at the smallest size."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tranship.bench import BENCHES
from tranship.bench import e2e as bench
from tranship.bench.e2e import BARS, add_figures, main, run_rounds
from tranship.bench.report import Report
from tranship.bench.sides import Round
from tranship.bench.workloads import QUICK, WORKLOADS
from tranship.lookup import resolve
from tranship.types import RunError, UserError


def round_of(tokens: int, gib: float = 1.0, **step: Any) -> Round:
    made = {"tokens": tokens, "seconds": 1.0, "stages": {}, "dock_share": 0.001, "logprob_gap_max": None} | step
    return Round([made], first_step_s=4.0, peak_bytes=int(gib * 2**30), versions={"trl": "1.16.0"})


def test_figures_are_ratios_within_a_round() -> None:
    report = Report("", BARS)
    done = {
        "ours": [round_of(100, 2.0), round_of(300, 2.0)],
        "plain_loop": [round_of(50), round_of(100)],
        "trl": [round_of(20, 8.0), round_of(30, 10.0)],
    }
    add_figures(report, WORKLOADS["W"], done)
    assert report.rounds["vs_plain_loop"] == [2.0, 3.0]
    assert report.rounds["vs_trl"] == [5.0, 10.0]
    assert report.rounds["peak_memory_vs_trl"] == [0.25, 0.2]
    assert report.rounds["seconds_to_first_step"] == [4.0, 4.0]
    assert report.rounds["dock_share"] == [0.001, 0.001]
    assert report.missing == {"vs_plain_loop_bf16": "ours_bf16 and plain_loop_bf16 did not run"}
    add_figures(report, WORKLOADS["T"], done)
    assert {"vs_plain_loop_T", "vs_trl_T"} <= report.rounds.keys()
    add_figures(report, WORKLOADS["L"], {"ours": done["ours"]})
    assert report.missing["vs_plain_loop_L"] == "plain_loop did not run"
    assert "vs_trl_L" not in {*report.rounds, *report.missing}


def test_a_peer_that_is_not_there_is_not_measured_rather_than_beaten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSHIP_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(bench, "run_round", lambda *args, **named: round_of(10))
    report = Report("", BARS)
    done = run_rounds(WORKLOADS["W"], ["ours", "trl"], 2, tmp_path, Console(file=io.StringIO()), report)
    assert list(done) == ["ours"]
    assert "make bench-env" in report.notes[0]
    add_figures(report, WORKLOADS["W"], done)
    assert report.to_json()["vs_trl"] is None
    assert "vs_trl" in report.to_json()["not_measured"]


def test_a_peer_that_fails_leaves_the_run_and_ours_that_fails_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(side: str, *args: Any, **named: Any) -> Round:
        if side == failing:
            raise RunError("no memory")
        return round_of(10)

    monkeypatch.setattr(bench, "run_round", fails)
    monkeypatch.setattr(bench, "trl_python", lambda: tmp_path)
    report = Report("", BARS)
    failing = "trl"
    done = run_rounds(WORKLOADS["W"], ["ours", "trl"], 2, tmp_path, Console(file=io.StringIO()), report)
    assert {side: len(rounds) for side, rounds in done.items()} == {"ours": 2}
    assert "TRL was not measured on W: no memory" in report.notes
    failing = "ours"
    with pytest.raises(RunError, match="no memory"):
        run_rounds(WORKLOADS["W"], ["ours"], 2, tmp_path, Console(file=io.StringIO()), report)


def test_an_unknown_workload_or_side_is_named() -> None:
    with pytest.raises(UserError, match="workloads has no 'X'; use some of: W, L, T"):
        main(True, None, workloads="W,X")
    with pytest.raises(UserError, match="sides has no 'verl'"):
        main(True, None, sides="verl")


def test_the_table_of_benchmarks_resolves() -> None:
    for name in BENCHES:
        assert callable(resolve(name, BENCHES, "bench"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["T", "L"])
def test_real_sides_do_the_same_work(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    small = replace(QUICK[name], model="tiny-random", num_prompts=2, group_size=4, max_new_tokens=8, plain_rows=8)
    monkeypatch.setitem(bench.QUICK, name, small)
    out = tmp_path / "out.json"
    assert main(True, out, workloads=name, sides="ours,plain_loop", rounds=1) == 0
    values = json.loads(out.read_text())
    assert values[f"vs_plain_loop_{name}"] > 0
    assert values[f"tokens_per_s_{name}_ours"] > 0
    assert values[f"peak_gib_{name}_plain_loop"] > 0.1
    assert values["repeats"] == 1
