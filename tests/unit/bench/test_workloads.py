"""Workloads are the same for every side, and drawn lengths are what the design says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tranship.bench.dense_reward import compute_score
from tranship.bench.workloads import QUICK, WORKLOADS, Workload, drawn_length, write_prompts


def test_drawn_lengths_are_log_normal_with_a_quarter_of_the_cap_as_median() -> None:
    lengths = np.array([drawn_length(group, sample, 512) for group in range(200) for sample in range(8)])
    assert 115 <= np.median(lengths) <= 141
    assert lengths.min() >= 1
    assert lengths.max() == 512, "two in a hundred pass two standard deviations and are capped"
    assert 0.005 < (lengths == 512).mean() < 0.05
    assert drawn_length(3, 5, 512) == drawn_length(3, 5, 512)


@pytest.mark.parametrize("workload", [*WORKLOADS.values(), *QUICK.values()], ids=lambda w: f"{w.name}{w.num_prompts}")
def test_prompts_and_rows_fit_the_steps(workload: Workload, tmp_path: Path) -> None:
    write_prompts(workload, tmp_path / "a.jsonl")
    write_prompts(workload, tmp_path / "b.jsonl")
    assert (tmp_path / "a.jsonl").read_text() == (tmp_path / "b.jsonl").read_text()
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert len(rows) == workload.steps * workload.num_prompts
    a, b = (int(word) for word in rows[0]["prompt"][0]["content"].removeprefix("What is ").split("?")[0].split(" + "))
    assert rows[0]["reward_model"]["ground_truth"] == str(a + b)
    assert workload.num_samples % workload.trl_rows == 0
    assert workload.trl_rows % workload.group_size == 0 or workload.group_size % workload.trl_rows == 0
    lengths = workload.lengths()
    assert (lengths is None) == (not workload.drawn)
    if lengths is not None:
        assert [len(group) for group in lengths] == [workload.group_size] * len(rows)


def test_the_dense_reward_has_a_signal() -> None:
    assert compute_score("sums", "a1bc", "") == 0.5
    assert compute_score("sums", "", "") == 0.0
