"""A step that looks like an accident is kept whole, once, and never so many that the disk fills up."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tranship.config.schema import ObserveConfig
from tranship.observe import snapshot as module
from tranship.observe.record import StepRecord
from tranship.observe.snapshot import RunningMean, SnapshotWatch, snapshots_wanted
from tranship.observe.trackers import JsonlTracker

MakeStep = Callable[..., StepRecord]


@pytest.fixture
def record(step_record: MakeStep) -> MakeStep:
    """Makes a StepRecord of 4 samples with the same reward: (step, reward, field=value, ...)."""

    def make(step: int, reward: float = 0.8, **changed: Any) -> StepRecord:
        return step_record(step, rewards=np.full(4, reward), statuses=("scored",) * 4, **changed)

    return make


def watch(run_dir: Path, **changed: float) -> SnapshotWatch:
    return SnapshotWatch(ObserveConfig.model_validate(changed), run_dir)


def sample(score: float | None, **more: Any) -> dict[str, Any]:
    return {"input": "1 + 2", "output": "3", "score": score, "status": "scored", **more}


def read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    lines = (folder / "samples.jsonl").read_text().splitlines()
    return json.loads((folder / "snapshot.json").read_text()), [json.loads(line) for line in lines]


@settings(max_examples=50)
@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30))
def test_the_running_mean_weighs_each_value_by_powers_of_its_factor(values: list[float]) -> None:
    running = RunningMean()
    for value in values:
        running.add(value)
    weights = 0.9 ** np.arange(len(values))[::-1]
    mean = np.average(values, weights=weights)
    assert running.mean == pytest.approx(mean, abs=1e-9)
    deviation = math.sqrt(np.average((np.array(values) - mean) ** 2, weights=weights))
    assert running.deviation == pytest.approx(deviation, abs=1e-5)


def test_a_fall_of_the_reward_is_kept_with_all_there_is(tmp_path: Path, record: MakeStep) -> None:
    looks = watch(tmp_path)
    for step in range(1, 6):
        assert looks.look(record(step), [sample(0.8)]) is None
    arrays = {
        "token_ids": np.array([5, 6], dtype=np.int32),
        "logprobs": np.array([-0.1, np.nan], dtype=np.float32),
        "ref_logprobs": np.array([-0.25, -0.5], dtype=np.float32),
        "response_mask": np.array([True, False]),
    }
    kept = looks.look(record(6, 0.3), [sample(1.0), sample(0.0, **arrays), sample(None)])
    assert kept is not None
    assert kept.folder == tmp_path / "snapshots" / "step-6"
    about, samples = read(kept.folder)
    assert about["step"] == 6
    assert about["reasons"] == list(kept.reasons) == ["the mean reward fell to 0.3, after a running mean of 0.8"]
    assert about["metrics"]["critic/score/mean"] == pytest.approx(0.3)
    assert [row["score"] for row in samples] == [None, 0.0, 1.0], "the worst come first"
    assert samples[1]["token_ids"] == [5, 6]
    assert samples[1]["logprobs"] == [-0.1, None]
    assert samples[1]["ref_logprobs"] == [-0.25, -0.5]
    assert samples[1]["response_mask"] == [True, False]
    assert [path.name for path in (tmp_path / "snapshots").iterdir()] == ["step-6"], "nothing half-written is left"


@pytest.mark.parametrize(
    ("before", "reward"),
    [
        ([0.8] * 4, 0.0),  # Too few steps to know what is usual.
        ([0.8] * 5, 0.41),  # Not by half.
        ([0.0] * 5, -1.0),  # Nothing to fall from.
        ([-0.5] * 5, -2.0),
        ([0.0, 0.2] * 5, 0.0),  # No more than what they vary anyway.
    ],
)
def test_other_falls_are_not(tmp_path: Path, record: MakeStep, before: list[float], reward: float) -> None:
    looks = watch(tmp_path)
    for step, value in enumerate([*before, reward], start=1):
        assert looks.look(record(step, value), [sample(value)]) is None
    assert not (tmp_path / "snapshots").exists()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"train": {"kl": 0.6}}, "kl is 0.6, above observe.snapshot_kl 0.5"),
        ({"train": {"approx_kl": math.nan}}, "approx_kl is nan, above"),
        ({"logprob_gap_mean": 0.2}, "differ by 0.2 (mean), above 0.1"),
        ({"logprob_gap_max": 4.0}, "differ by 4 (max), above 3"),
    ],
)
def test_the_first_of_several_such_steps_is_kept(
    tmp_path: Path, record: MakeStep, changed: dict[str, Any], said: str
) -> None:
    looks = watch(tmp_path)
    assert looks.look(record(1), []) is None
    kept = looks.look(record(2, **changed), [sample(0.0)])
    assert kept is not None
    (reason,) = kept.reasons
    assert said in reason
    assert looks.look(record(3, **changed), []) is None, "it is the same accident"
    assert looks.look(record(4), []) is None
    assert looks.look(record(5, **changed), []) is not None, "it was over in between"


def test_zero_switches_each_off(tmp_path: Path, record: MakeStep) -> None:
    without_kl = watch(tmp_path / "a", snapshot_kl=0.0)
    assert without_kl.look(record(1, train={"kl": 9.0}), []) is None
    without_reward = watch(tmp_path / "b", snapshot_reward_drop=0.0)
    for step in range(1, 7):
        assert without_reward.look(record(step, 0.8 if step < 6 else 0.0), []) is None
    without_both = watch(tmp_path / "c", snapshot_reward_drop=0.0, snapshot_kl=0.0)
    assert without_both.look(record(1, logprob_gap_max=9.0), []) is None


@pytest.mark.parametrize(("drop", "kl", "wanted"), [(0.5, 0.5, True), (0, 0.5, True), (0.5, 0, True), (0, 0, False)])
def test_tokens_are_wanted_where_a_snapshot_may_come(drop: float, kl: float, wanted: bool) -> None:
    observe = ObserveConfig.model_validate({"snapshot_reward_drop": float(drop), "snapshot_kl": float(kl)})
    assert snapshots_wanted(observe) is wanted


def test_there_are_never_more_than_ten(tmp_path: Path, record: MakeStep) -> None:
    for start in (1, 13):  # The second time, the run was resumed.
        looks = watch(tmp_path)
        for step in range(start, start + 24):
            looks.look(record(step, train={"kl": float(step % 2)}), [])
    assert len(list((tmp_path / "snapshots").iterdir())) == 10
    again = watch(tmp_path).look(record(1, train={"kl": 2.0}), [sample(0.5)])
    assert again is not None, "a step that is done again takes the place of its own snapshot"
    assert read(again.folder)[1][0]["score"] == 0.5


def test_only_the_worst_of_many_samples_are_kept(
    tmp_path: Path, record: MakeStep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_SAMPLES", 2)
    kept = watch(tmp_path).look(record(1, train={"kl": 1.0}), [sample(0.5), sample(0.25), sample(None), sample(1.0)])
    assert kept is not None
    about, samples = read(kept.folder)
    assert [row["score"] for row in samples] == [None, 0.25]
    assert (about["num_samples"], about["num_written"]) == (4, 2)


def test_a_resumed_run_knows_the_rewards_before(tmp_path: Path, record: MakeStep) -> None:
    tracker = JsonlTracker(tmp_path, None, project="p", config={})
    for step in range(1, 6):
        tracker.log("step", step, {"critic/score/mean": 0.8})
    tracker.log("during", 5, {"val/score": 0.1})
    tracker.log("step", 6, {"actor/loss": 0.1})
    tracker.close()
    assert watch(tmp_path).look(record(7, 0.1), []) is not None


def test_a_batch_without_rewards_is_looked_at_too(tmp_path: Path, recorded_step: MakeStep) -> None:
    kept = watch(tmp_path).look(recorded_step(1, train={"loss": 1.0, "kl": 3.0}), [])
    assert kept is not None
    assert read(kept.folder)[1] == []
