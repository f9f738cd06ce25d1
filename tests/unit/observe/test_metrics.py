"""Metric names and their values: what does not exist is left out, what verl names is named so."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tranship.observe.jsonl import finite
from tranship.observe.metrics import METRICS, _train_metrics, step_metrics, validation_metrics
from tranship.observe.record import StepRecord, ValidationRecord
from tranship.observe.scores import PromptScores, statistics

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


def test_statistics_of_several_samples_have_verls_names(validation_record: MakeValidation) -> None:
    prompts = [PromptScores("sums", [1.0, 0.0], [True, False], ["7", "8"])]
    found = statistics(prompts, 2)
    record = replace(validation_record("after", 3, 0.5), statistics=found, by_source={"sums": found}, masked=1)
    metrics = validation_metrics(record)
    assert metrics["val-core/sums/reward/mean@2"] == 0.5
    assert metrics["val-core/sums/reward/best@2/mean"] == 1.0
    assert metrics["val-core/sums/reward/maj@2/mean"] == 0.5
    assert metrics["val-aux/sums/pass@1"] == 0.5
    assert metrics["val-aux/sums/pass@2"] == metrics["val/pass@2"] == 1.0
    assert metrics["val/maj@2"] == 0.5
    assert metrics["val/masked"] == 1
    assert "val/score_low" not in metrics, "one prompt says nothing of how sure its mean is"


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


def test_the_critic_the_correction_and_preferences_have_rooms_of_their_own(step_record: MakeStep) -> None:
    train = {
        "loss": 1.0,
        "entropy": 0.5,
        "kl": 0.25,
        "approx_kl": 0.125,
        "grad_norm": 2.0,
        "critic_value_loss": 3.0,
        "critic_value_clip_frac": 4.0,
        "critic_return_mean": 5.0,
        "critic_grad_norm": 6.0,
        "critic_learning_rate": 7.0,
        "critic_value_mean": 8.0,
        "correction_weight_mean": 9.0,
        "pair_accuracy": 10.0,
        "nll": 11.0,
    }
    metrics = step_metrics(step_record(1, train=train))
    wanted = {
        "actor/loss": 1.0,
        "actor/entropy": 0.5,
        "actor/kl_loss": 0.25,
        "actor/ppo_kl": 0.125,
        "actor/grad_norm": 2.0,
        "critic/vf_loss": 3.0,
        "critic/vf_clipfrac": 4.0,
        "critic/returns/mean": 5.0,
        "critic/grad_norm": 6.0,
        "critic/lr": 7.0,
        "critic/vpred_mean": 8.0,
        "rollout_corr/weight_mean": 9.0,
        "dpo/accuracy": 10.0,
        "sft/nll": 11.0,
    }
    assert wanted.items() <= metrics.items()
    assert metrics["critic/score/mean"] == pytest.approx(2 / 3)
    without = step_metrics(step_record(1, train={}))
    assert metrics.keys() - without.keys() == wanted.keys(), "nothing collides and nothing is dropped"
    assert {name.split("/")[0] for name in metrics} <= {metric.written.split("/")[0] for metric in METRICS}


def _moments(values: np.ndarray, returns: np.ndarray) -> dict[str, float]:
    return {
        "critic_value_mean": float(values.mean()),
        "critic_return_mean": float(returns.mean()),
        "critic_return_square": float((returns**2).mean()),
        "critic_value_error_square": float(((values - returns) ** 2).mean()),
    }


@given(st.lists(st.tuples(st.integers(-8, 8), st.integers(-8, 8)), min_size=2, max_size=12))
def test_the_explained_variance_comes_from_the_moments(pairs: list[tuple[int, int]]) -> None:
    values, returns = np.array(pairs, dtype=np.float64).T
    metrics = _train_metrics(_moments(values, returns), policy=True)
    assert metrics.keys() - {"critic/vf_explained_var"} == {"critic/vpred_mean", "critic/returns/mean"}
    if returns.var() > 0:
        expected = 1 - (returns - values).var() / returns.var()
        assert metrics["critic/vf_explained_var"] == pytest.approx(expected, abs=1e-9)
    else:
        assert "critic/vf_explained_var" not in metrics


def test_sources_environments_and_data_are_named(step_record: MakeStep) -> None:
    record = step_record(
        1, reward_by_source={"sums": 0.5, "a/b": 1.0}, rollout_extra={"turns": 2.5}, data={"epoch": 1, "position": 40}
    )
    metrics = step_metrics(record)
    assert metrics["reward_by_source/sums"] == 0.5
    assert metrics["reward_by_source/a/b"] == 1.0
    assert metrics["env/turns"] == 2.5
    assert (metrics["data/epoch"], metrics["data/position"]) == (1, 40)
    assert {name.split("/")[0] for name in metrics} <= {metric.written.split("/")[0] for metric in METRICS}


def test_a_batch_of_recorded_responses_has_no_numbers_of_samples(recorded_step: MakeStep) -> None:
    metrics = step_metrics(recorded_step(2))
    assert metrics["actor/loss"] == 0.6931
    assert metrics["perf/total_num_tokens"] == 400
    assert metrics["perf/throughput"] == 100.0
    assert metrics["perf/tokens_generated"] == 0
    for head in ("samples/", "critic/", "response", "staleness/", "mismatch/", "perf/generated", "actor/pg_loss"):
        assert not any(name.startswith(head) for name in metrics), head


def test_the_loss_is_not_the_policy_loss_where_it_has_an_entropy_term(step_record: MakeStep) -> None:
    assert "actor/pg_loss" not in step_metrics(step_record(1, train={"loss": 0.25, "entropy": 0.5}))
