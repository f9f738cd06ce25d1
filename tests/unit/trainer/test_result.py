"""The last lines of a run say what was gained and where it lies."""

from __future__ import annotations

from pathlib import Path

from tranship.trainer.result import result_lines

SUMMARY = {"steps": 3, "train_seconds": 12.3, "tokens_per_s": 99.6}


def test_scores_and_places(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text("")
    lines = result_lines(tmp_path, {**SUMMARY, "val_before": 0.07, "val_after": 0.8})
    assert lines == [
        "held-out, sampled: 7.0% before, 80.0% after",
        "3 steps in 12 s, 100 generated tokens/s",
        f"samples   {tmp_path / 'samples.jsonl'}",
    ]


def test_a_run_without_validation_claims_none(tmp_path: Path) -> None:
    assert result_lines(tmp_path, {**SUMMARY, "val_before": None, "val_after": 0.8}) == [
        "3 steps in 12 s, 100 generated tokens/s"
    ]
