"""What a run leaves in its folder, and that a resumed run leaves each step once."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tranship.config.schema import ObserveConfig
from tranship.observe.record import StepRecord, ValidationRecord
from tranship.observe.recorder import Recorder

MakeStep = Callable[..., StepRecord]
MakeValidation = Callable[..., ValidationRecord]


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def open_recorder(run_dir: Path, resumed_step: int | None = None, **observe: object) -> Recorder:
    config = ObserveConfig.model_validate({"console": "off", "trackers": (), **observe})
    return Recorder(run_dir, config, total_steps=10, resumed_step=resumed_step)


def sample(index: int, status: str = "scored", score: float | None = 1.0) -> dict[str, Any]:
    return {
        "input": "What is 1 + 2?",
        "output": f"答案 {index}",
        "gts": 3,
        "score": score,
        "group_id": 7,
        "sample_index": index,
        "attempt": 0,
        "status": status,
        "reason": "timeout" if status == "invalid" else "",
        "finish_reason": "stop",
        "advantage": 0.5,
        "logprob_mean": math.nan,
        "versions": [3, 4],
        "num_tokens": 2,
        "extra": {"well_formed": math.inf},
    }


def test_each_step_is_a_line_at_once(tmp_path: Path, step_record: MakeStep) -> None:
    recorder = open_recorder(tmp_path)
    recorder.step(step_record(1))
    recorder.step(step_record(2))
    found = rows(tmp_path / "metrics.jsonl")  # Read before close: a killed run keeps its lines.
    assert [(row["kind"], row["step"]) for row in found] == [("step", 1), ("step", 2)]
    assert found[0]["critic/score/mean"] == pytest.approx(2 / 3)
    assert found[1]["time"] >= found[0]["time"] > 1.7e9
    recorder.close("finished")


def test_samples_have_verls_keys_and_ours(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path)
    recorder.samples(4, [sample(0), sample(1, status="invalid", score=None)])
    recorder.close("finished")
    first, second = rows(tmp_path / "samples.jsonl")
    assert {"input", "output", "gts", "score", "step"} <= first.keys()
    assert (first["step"], first["output"], first["versions"]) == (4, "答案 0", [3, 4])
    assert first["logprob_mean"] is None
    assert first["extra"] == {"well_formed": None}
    assert (second["status"], second["reason"], second["score"]) == ("invalid", "timeout", None)


def test_the_limit_of_samples_never_hides_an_invalid_one(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path, samples_per_step=1)
    recorder.samples(1, [sample(0), sample(1), sample(2, status="invalid", score=None)])
    recorder.close("finished")
    assert [row["sample_index"] for row in rows(tmp_path / "samples.jsonl")] == [0, 2]


def test_a_resumed_run_has_each_step_once(
    tmp_path: Path, step_record: MakeStep, validation_record: MakeValidation
) -> None:
    recorder = open_recorder(tmp_path)
    recorder.validation(validation_record("before", 0, 0.125))
    for step in (1, 2, 3):
        recorder.step(step_record(step))
        recorder.samples(step, [sample(step)])
    # No close: the process was killed, and the last lines were torn.
    for name in ("metrics.jsonl", "samples.jsonl", "events.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 4, "ti')

    again = open_recorder(tmp_path, resumed_step=2)
    assert again.totals()["steps"] == 2
    for step in (3, 4):
        again.step(step_record(step))
        again.samples(step, [sample(step)])
    again.close("finished")
    metrics = [row for row in rows(tmp_path / "metrics.jsonl") if row["kind"] == "step"]
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    assert [row["step"] for row in rows(tmp_path / "samples.jsonl")] == [1, 2, 3, 4]
    assert [row["kind"] for row in rows(tmp_path / "events.jsonl")] == ["start", "resume", "end"]
    before = again.validated("before")
    assert before is not None
    assert (before["step"], before["val/score"]) == (0, 0.125)
    assert again.totals()["val_before"] == 0.125


def test_totals_add_up_over_a_restart(tmp_path: Path, step_record: MakeStep, validation_record: MakeValidation) -> None:
    invalid = {"statuses": ("scored", "invalid", "scored", "scored"), "reasons": ("", "timeout", "", "")}
    recorder = open_recorder(tmp_path)
    recorder.validation(validation_record("before", 0, 0.1))
    recorder.step(step_record(1, **invalid))
    recorder.step(step_record(2))
    recorder.close("interrupted")
    again = open_recorder(tmp_path, resumed_step=2)
    again.step(step_record(3, **invalid))
    again.validation(validation_record("after", 3, 0.4))
    again.close("finished")
    totals = again.totals()
    assert totals == {
        "steps": 3,
        "steps_with_update": 0,
        "train_seconds": 12.0,
        "tokens_generated": 60,
        "tokens_per_s": 5.0,
        "invalid": {"timeout": 2},
        "val_before": 0.1,
        "val_greedy_before": 0.2,
        "val_well_formed_before": 0.5,
        "val_well_formed_greedy_before": None,
        "val_after": 0.4,
        "val_greedy_after": 0.8,
        "val_well_formed_after": 0.5,
        "val_well_formed_greedy_after": None,
    }


def test_a_new_run_in_an_old_folder_starts_afresh(tmp_path: Path, step_record: MakeStep) -> None:
    old = open_recorder(tmp_path)
    old.step(step_record(1))
    old.samples(1, [sample(0)])
    old.close("finished")
    new = open_recorder(tmp_path)
    new.close("finished")
    assert rows(tmp_path / "metrics.jsonl") == []
    assert rows(tmp_path / "samples.jsonl") == []
    assert new.totals()["steps"] == 0


def test_an_event_is_written_and_may_be_said(tmp_path: Path) -> None:
    out = io.StringIO()
    config = ObserveConfig(console="plain", trackers=())
    recorder = Recorder(tmp_path, config, total_steps=1, terminal=Console(file=out))
    recorder.event("checkpoint", {"step": 2}, say="checkpoint of step 2 [saved]")
    recorder.event("quiet", {"step": 3})
    recorder.close("finished")
    recorder.close("finished")
    kinds = [row["kind"] for row in rows(tmp_path / "events.jsonl")]
    assert kinds == ["start", "checkpoint", "quiet", "end"]
    assert "checkpoint of step 2 [saved]\n" in out.getvalue()
    assert "quiet" not in out.getvalue()


def test_samples_of_a_validation_have_a_file_of_their_own(tmp_path: Path) -> None:
    recorder = open_recorder(tmp_path, samples_per_step=0)
    recorder.validation_samples(0, [sample(0) | {"when": "before", "greedy": True}])
    recorder.validation_samples(3, [sample(1) | {"when": "during", "greedy": False}])
    recorder.close("finished")
    open_recorder(tmp_path, resumed_step=2).close("finished")
    (row,) = rows(tmp_path / "val_samples.jsonl")
    assert (row["step"], row["when"], row["greedy"], row["logprob_mean"]) == (0, "before", True, None)
    assert rows(tmp_path / "samples.jsonl") == []


def test_a_validation_without_a_scored_sample_has_no_score(tmp_path: Path, validation_record: MakeValidation) -> None:
    recorder = open_recorder(tmp_path)
    recorder.validation(validation_record("after", 1, math.nan))
    recorder.close("finished")
    assert recorder.totals()["val_after"] is None


def test_a_snapshot_is_said_and_its_arrays_stay_out_of_the_samples(tmp_path: Path, step_record: MakeStep) -> None:
    out = io.StringIO()
    config = ObserveConfig(console="plain", trackers=())
    recorder = Recorder(tmp_path, config, total_steps=2, terminal=Console(file=out, width=500))
    row = sample(0) | {"logprobs": np.array([-0.5, -1.0], dtype=np.float32)}
    for step, kl in ((1, 0.1), (2, 0.9)):
        recorder.step(step_record(step, train={"kl": kl}))
        recorder.samples(step, [row])
    recorder.close("finished")
    assert all("logprobs" not in written for written in rows(tmp_path / "samples.jsonl"))
    (kept,) = rows(tmp_path / "snapshots" / "step-2" / "samples.jsonl")
    assert kept["logprobs"] == [-0.5, -1.0]
    (event,) = [event for event in rows(tmp_path / "events.jsonl") if event["kind"] == "snapshot"]
    assert event["folder"] == str(tmp_path / "snapshots" / "step-2")
    assert "step 2: kl is 0.9, above observe.snapshot_kl 0.5: kept in" in out.getvalue()
    open_recorder(tmp_path).close("finished")
    assert not (tmp_path / "snapshots").exists(), "a new run in the folder starts afresh"


def test_a_snapshot_that_cannot_be_written_ends_nothing(tmp_path: Path, step_record: MakeStep) -> None:
    recorder = open_recorder(tmp_path)
    (tmp_path / "snapshots").write_text("in the way")
    recorder.step(step_record(1, train={"kl": 0.9}))
    recorder.samples(1, [sample(0)])
    recorder.close("finished")
    assert "snapshot_failed" in [event["kind"] for event in rows(tmp_path / "events.jsonl")]


def test_a_run_of_recorded_responses_has_losses_in_its_totals(tmp_path: Path, recorded_step: MakeStep) -> None:
    recorder = open_recorder(tmp_path)
    for step, loss in ((1, 2.0), (2, 1.5), (3, 1.25)):
        recorder.step(recorded_step(step, train={"loss": loss}))
        recorder.samples(step, [])
    recorder.close("finished")
    totals = open_recorder(tmp_path, resumed_step=3).totals()
    assert (totals["steps"], totals["loss_first"], totals["loss_last"]) == (3, 2.0, 1.25)
    assert totals["tokens_per_s"] == 0
