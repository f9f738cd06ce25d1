"""The table of `tranship eval`: what it shows of the figures, and what it leaves out for saying the same twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tranship.cli.evaluate import _rows, _show


def estimate(value: float, low: float | None = 0.1, high: float | None = 0.9) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high, "num_prompts": 5}


def facts(**sources: dict[str, Any]) -> dict[str, Any]:
    every = {"sampled": {"mean@2": estimate(0.5)}, "greedy": {"mean@1": estimate(0.25), "pass@1": estimate(0.25)}}
    return {
        **every,
        "sources": {name: {"sampled": sampled, "greedy": {}} for name, sampled in sources.items()},
        "extra": {"well_formed": 0.75},
        "invalid": {"timeout": 3},
        "masked": 0,
        "notes": ["no maj@k: because"],
    }


def test_scores_of_0_and_1_are_not_said_twice() -> None:
    found = {name: estimate(0.5) for name in ("mean@2", "pass@1")} | {
        name: estimate(0.75) for name in ("pass@2", "best@2", "maj@2")
    }
    assert [row[1] for row in _rows(facts(a=found))] == ["mean@2", "pass@2", "maj@2"]


def test_scores_of_any_size_are_all_shown() -> None:
    found = {"mean@2": estimate(3.0), "pass@1": estimate(1.0), "pass@2": estimate(1.0), "best@2": estimate(4.0)}
    assert [row[1] for row in _rows(facts(a=found))] == ["mean@2", "pass@1", "pass@2", "best@2"]


def test_several_sources_have_a_sum_and_one_prompt_no_interval() -> None:
    rows = list(_rows(facts(a={"mean@2": estimate(0.5, None, None)}, b={"mean@2": estimate(1.0)})))
    assert rows == [
        ("a", "mean@2", "0.5000", "-", "5"),
        ("b", "mean@2", "1.0000", "0.1000 to 0.9000", "5"),
        ("(all)", "mean@2", "0.5000", "0.1000 to 0.9000", "5"),
        ("(all)", "greedy mean@1", "0.2500", "0.1000 to 0.9000", "5"),
    ]


def test_what_is_printed_elsewhere_than_on_a_terminal_is_plain(capsys: pytest.CaptureFixture[str]) -> None:
    _show(facts(a={"mean@2": estimate(0.5)}), Path("f.json"), Path("f.samples.jsonl"))
    printed = capsys.readouterr().out
    for text in ("a       mean@2", "invalid: 3 x timeout", "no maj@k: because", "f.json", "f.samples.jsonl"):
        assert text in printed
    assert "\x1b" not in printed
    assert "─" not in printed
