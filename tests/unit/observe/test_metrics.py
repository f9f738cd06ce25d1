"""Metric names and their values: what does not exist is left out, what verl names is named so."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest

from tranship.observe.jsonl import finite
from tranship.observe.metrics import METRICS, step_metrics, validation_metrics
from tranship.observe.record import StepRecord, ValidationRecord

MakeStep = Callable[..., StepRecord]
MakeValidation = Callable[..., ValidationRecord]


def test_names_of_verl_carry_the_values_of_the_step(step_record: MakeStep) -> None:
    metrics = step_metrics(step_record(3))
    assert metrics["training/global_step"] == 3
    assert metrics["critic/score/mean"] == pytest.approx(2 / 3)
    assert metrics["critic/score/max"] == 1.0
    assert metrics["critic/score/min"] == 0.0
    assert metrics["response_length/mean"] == 5.0
    assert metrics["response_length/clip_ratio"] == 0.25
    assert metrics["prompt_length/max"] == 12
    assert metrics["actor/pg_loss"] == 0.5
    assert metrics["actor/pg_clipfrac"] == 0.125
    assert metrics["actor/lr"] == 2e-5
    assert metrics["actor/something_new"] == 7.0
    assert metrics["timing_s/gen"] == 1.0
    assert metrics["timing_s/update_actor"] == 2.0
    assert metrics["timing_s/step"] == 4.0


def test_prompts_given_once_per_group_count_for_each_sample(step_record: MakeStep) -> None:
    # 2 prompts of 10 and 12 tokens, 4 samples of 2, 4, 6 and 8: 2 * 22 + 20 tokens in 4 s on 2 devices.
    metrics = step_metrics(step_record(1, prompt_lengths=np.array([10, 12]), num_devices=2))
    assert metrics["perf/total_num_tokens"] == 64
    assert metrics["perf/throughput"] == 8.0


def test_an_invalid_sample_enters_no_mean_and_is_counted_by_reason(step_record: MakeStep) -> None:
    rewards = np.array([1.0, math.nan, 1.0, 1e9])
    statuses = ("scored", "invalid", "scored", "invalid")
    record = step_record(1, rewards=rewards, statuses=statuses, reasons=("", "timeout", "", "raised"))
    metrics = step_metrics(record)
    assert metrics["critic/score/mean"] == 1.0
    assert metrics["critic/score/max"] == 1.0
    assert metrics["samples/invalid"] == 2
    assert metrics["samples/invalid/timeout"] == 1
    assert metrics["samples/invalid/raised"] == 1
    assert metrics["samples/scored"] == 2


def test_a_step_without_scored_samples_has_no_score_rather_than_zero(step_record: MakeStep) -> None:
    record = step_record(1, statuses=("invalid",) * 4, reasons=("exit",) * 4)
    assert not any(name.startswith("critic/score") for name in step_metrics(record))


def test_ours_staleness_signal_gap_and_dock(step_record: MakeStep) -> None:
    metrics = step_metrics(step_record(1, staleness=np.array([0, 0, 2, 1])))
    assert metrics["staleness/mean"] == 0.75
    assert metrics["staleness/max"] == 2
    assert (metrics["staleness/hist/0"], metrics["staleness/hist/1"], metrics["staleness/hist/2"]) == (2, 1, 1)
    assert metrics["groups/with_signal_share"] == 0.5
    assert metrics["groups/dropped/no_signal"] == 1
    assert metrics["mismatch/logprob_gap_max"] == 1e-5
    assert metrics["dock/wait_share"] == pytest.approx(0.01)
    assert metrics["reward_extra/well_formed"] == 0.75


def test_a_gap_that_was_not_measured_is_absent(step_record: MakeStep) -> None:
    metrics = step_metrics(step_record(1, logprob_gap_max=None, logprob_gap_mean=None))
    assert not any(name.startswith("mismatch/") for name in metrics)


def test_validation_names(validation_record: MakeValidation) -> None:
    metrics = validation_metrics(validation_record("before", 0, 0.125))
    assert metrics["val-core/sums/reward/mean@2"] == 0.125
    assert metrics["val/score"] == 0.125
    assert metrics["val/score_greedy"] == 0.25
    assert metrics["val/well_formed"] == 0.5


def test_metrics_are_plain_numbers_that_go_into_json(step_record: MakeStep) -> None:
    metrics = step_metrics(step_record(1, train={"loss": np.float32(np.nan)}))
    assert all(type(value) in (int, float) for value in metrics.values())
    assert math.isnan(metrics["actor/loss"]), "a NaN of the step stays visible"
    assert json.loads(json.dumps(finite(metrics), allow_nan=False))["actor/loss"] is None


def test_the_table_has_a_row_for_every_name_written(step_record: MakeStep, validation_record: MakeValidation) -> None:
    heads = {metric.written.split("/")[0] for metric in METRICS}
    written = step_metrics(step_record(1)) | validation_metrics(validation_record("after", 1, 1.0))
    assert {name.split("/")[0] for name in written} <= heads
    assert all(metric.meaning for metric in METRICS)


def test_columns_of_different_lengths_are_a_bug(step_record: MakeStep) -> None:
    with pytest.raises(AssertionError, match="different lengths"):
        step_record(1, rewards=np.array([1.0]))


def test_without_a_kl_term_the_loss_is_the_policy_loss(step_record: MakeStep) -> None:
    assert step_metrics(step_record(1, train={"loss": 0.25}))["actor/pg_loss"] == 0.25
    assert "actor/pg_loss" not in step_metrics(step_record(1, train={"loss": 0.25, "kl": 0.5}))
