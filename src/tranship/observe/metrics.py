"""Our fields to the metric names that verl's users know, in one table, and a step's record to a flat dict of numbers.

A number that does not exist (the mean of no scored sample) is left out, never written as 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from tranship.observe.record import StepRecord, ValidationRecord


class Metric(NamedTuple):
    """ours: field of a record, or `field.<part>`. written: the metric's name in files and trackers. verl: whether
    verl writes the same quantity under that name. meaning: one line."""

    ours: str
    written: str
    verl: bool
    meaning: str


METRICS: tuple[Metric, ...] = (
    Metric("step", "training/global_step", True, "trained batches so far"),
    Metric("policy_version", "training/policy_version", False, "version of the weights after the step"),
    Metric("rewards", "critic/score/mean|max|min", True, "what the reward function gave, scored samples only"),
    Metric("rewards", "critic/rewards/mean|max|min", True, "the same: no KL term is taken from rewards here"),
    Metric("advantages", "critic/advantages/mean|max|min", True, "advantages of trained tokens or samples"),
    Metric("reward_extra.<name>", "reward_extra/<name>", False, "means of further numbers of the reward function"),
    Metric("response_lengths", "response_length/mean|max|min", True, "tokens, end of text included"),
    Metric("finish_reasons", "response_length/clip_ratio", True, "share of responses that the cap cut"),
    Metric("finish_reasons", "response/aborted_ratio", True, "share of responses that were aborted"),
    Metric("prompt_lengths", "prompt_length/mean|max|min", True, "tokens, template included"),
    Metric("train.loss", "actor/loss", True, "the whole loss"),
    Metric("train.pg_loss", "actor/pg_loss", True, "the policy term of the loss; without a KL term, the loss"),
    Metric("train.clip_frac", "actor/pg_clipfrac", True, "share of tokens whose gradient the clip removed"),
    Metric("train.dual_clip_frac", "actor/pg_clipfrac_lower", True, "share of tokens at the dual clip's bound"),
    Metric("train.approx_kl", "actor/ppo_kl", True, "KL between sampler and current policy (k3; verl: k1)"),
    Metric("train.kl", "actor/kl_loss", True, "KL to the reference, before its coefficient"),
    Metric("train.entropy", "actor/entropy", True, "entropy of the policy per token"),
    Metric("train.grad_norm", "actor/grad_norm", True, "norm of the gradient before clipping"),
    Metric("train.learning_rate", "actor/lr", True, "learning rate of the step"),
    Metric("train.<name>", "actor/<name>", False, "anything else that the loss or the engine reports"),
    Metric("timings_s.rollout", "timing_s/gen", True, "seconds of generation"),
    Metric("timings_s.reward", "timing_s/reward", True, "seconds of scoring"),
    Metric("timings_s.reference", "timing_s/ref", True, "seconds of the reference model"),
    Metric("timings_s.advantage", "timing_s/adv", True, "seconds of advantages"),
    Metric("timings_s.train", "timing_s/update_actor", True, "seconds of the update"),
    Metric("timings_s.reshard", "timing_s/update_weights", True, "seconds of moving weights to the sampler"),
    Metric("timings_s.validation", "timing_s/testing", True, "seconds of validation"),
    Metric("timings_s.checkpoint", "timing_s/save_checkpoint", True, "seconds of writing a checkpoint"),
    Metric("timings_s.<stage>", "timing_s/<stage>", False, "seconds of any other stage"),
    Metric("seconds", "timing_s/step", True, "wall time of the step"),
    Metric("seconds", "perf/time_per_step", True, "wall time of the step"),
    Metric("prompt_lengths, response_lengths", "perf/total_num_tokens", True, "prompt + response tokens of the batch"),
    Metric("prompt_lengths, response_lengths", "perf/throughput", True, "those tokens per second and device"),
    Metric("tokens_generated", "perf/tokens_generated", False, "response tokens that the samplers made"),
    Metric("tokens_generated", "perf/generated_tokens_per_s", False, "those per second of wall time"),
    Metric("scores", "val-core/<source>/reward/mean@<n>", True, "validation: mean score under sampling"),
    Metric("score", "val/score", False, "validation: mean score over all sources, under sampling"),
    Metric("score_greedy", "val/score_greedy", False, "validation: mean score of greedy responses"),
    Metric("extra.<name>", "val/<name>", False, "validation: means of further numbers, under sampling"),
    Metric("extra_greedy.<name>", "val/<name>_greedy", False, "validation: the same, greedy"),
    Metric("seconds", "val/seconds", False, "wall time of the validation"),
    Metric("staleness", "staleness/mean|max", False, "versions between sampling and use"),
    Metric("staleness", "staleness/hist/<k>", False, "samples that were k versions old"),
    Metric("num_groups_with_signal", "groups/with_signal_share", False, "share of groups whose rewards differ"),
    Metric("num_groups", "groups/num", False, "groups that the step used up"),
    Metric("dropped_groups.<reason>", "groups/dropped/<reason>", False, "groups that were not trained on"),
    Metric("statuses", "samples/scored|masked|invalid", False, "samples by what became of their reward"),
    Metric("reasons", "samples/invalid/<reason>", False, "invalid samples by reason"),
    Metric("logprob_gap_max", "mismatch/logprob_gap_max", False, "largest |trainer - sampler| log-prob of a token"),
    Metric("logprob_gap_mean", "mismatch/logprob_gap_mean", False, "mean of the same (verl compares probabilities)"),
    Metric("dock_wait_s", "dock/wait_share", False, "waiting for the dock over wall time"),
    Metric("rss_bytes", "memory/rss_bytes", False, "resident memory of all processes"),
)


def _part_names(prefix: str) -> dict[str, str]:
    """The table's rows `prefix.<part>` as part -> written name, patterns left out."""
    rows = (metric for metric in METRICS if metric.ours.startswith(prefix + ".") and "<" not in metric.ours)
    return {metric.ours.removeprefix(prefix + "."): metric.written for metric in rows}


_TRAIN = _part_names("train")
_TIMINGS = _part_names("timings_s")


def step_metrics(record: StepRecord) -> dict[str, float]:
    """The flat dict of one step, names as in METRICS, values finite or as the step had them (a NaN stays visible)."""
    num_samples = len(record.rewards)
    metrics: dict[str, float] = {
        "training/global_step": record.step,
        "training/policy_version": record.policy_version,
        "groups/num": record.num_groups,
        "timing_s/step": record.seconds,
        "perf/time_per_step": record.seconds,
        "perf/tokens_generated": record.tokens_generated,
        "samples/invalid": 0,
    }
    metrics |= _spread("critic/score", record.scored_rewards) | _spread("critic/rewards", record.scored_rewards)
    metrics |= _spread("critic/advantages", record.advantages)
    metrics |= _spread("response_length", record.response_lengths) | _spread("prompt_length", record.prompt_lengths)
    metrics |= {f"samples/{status}": sum(s == status for s in record.statuses) for status in ("scored", "masked")}
    for reason, count in record.invalid_by_reason.items():
        metrics["samples/invalid"] += count
        metrics[f"samples/invalid/{reason}"] = count
    if num_samples:
        metrics["response_length/clip_ratio"] = sum(r == "length" for r in record.finish_reasons) / num_samples
        metrics["response/aborted_ratio"] = sum(r == "abort" for r in record.finish_reasons) / num_samples
    metrics |= {f"reward_extra/{name}": value for name, value in record.reward_extra.items()}
    metrics |= {f"groups/dropped/{reason}": count for reason, count in record.dropped_groups.items()}
    if record.num_groups:
        metrics["groups/with_signal_share"] = record.num_groups_with_signal / record.num_groups
    metrics |= _train_metrics(record.train)
    metrics |= {_TIMINGS.get(stage, f"timing_s/{stage}"): value for stage, value in record.timings_s.items()}
    metrics |= _speed(record) | _staleness(record.staleness)
    if record.logprob_gap_max is not None:
        metrics["mismatch/logprob_gap_max"] = record.logprob_gap_max
    if record.logprob_gap_mean is not None:
        metrics["mismatch/logprob_gap_mean"] = record.logprob_gap_mean
    if record.rss_bytes:
        metrics["memory/rss_bytes"] = record.rss_bytes
    return {name: _number(value) for name, value in metrics.items()}


def validation_metrics(record: ValidationRecord) -> dict[str, float]:
    """The flat dict of one validation, names as in METRICS."""
    suffix = f"reward/mean@{record.samples_per_prompt}"
    metrics = {f"val-core/{source}/{suffix}": score for source, score in record.scores.items()}
    metrics |= {"val/score": record.score, "val/seconds": record.seconds}
    if record.score_greedy is not None:
        metrics["val/score_greedy"] = record.score_greedy
    metrics |= {f"val/{name}": value for name, value in record.extra.items()}
    metrics |= {f"val/{name}_greedy": value for name, value in record.extra_greedy.items()}
    metrics |= {f"val/invalid/{reason}": count for reason, count in record.invalid.items()}
    return {name: _number(value) for name, value in metrics.items()}


def _train_metrics(train: Mapping[str, float]) -> dict[str, float]:
    written = {_TRAIN.get(name, f"actor/{name}"): value for name, value in train.items()}
    if "loss" in train and "kl" not in train:
        written.setdefault("actor/pg_loss", train["loss"])
    return written


def _speed(record: StepRecord) -> dict[str, float]:
    response_tokens = int(np.sum(record.response_lengths))
    num_prompts = len(record.prompt_lengths)
    samples_per_prompt = len(record.response_lengths) / num_prompts if num_prompts else 0.0
    total = response_tokens + int(np.sum(record.prompt_lengths) * samples_per_prompt)
    speed: dict[str, float] = {"perf/total_num_tokens": total}
    if record.seconds > 0:
        speed["perf/throughput"] = total / (record.seconds * record.num_devices)
        speed["perf/generated_tokens_per_s"] = record.tokens_generated / record.seconds
        speed["dock/wait_share"] = record.dock_wait_s / record.seconds
    return speed


def _staleness(staleness: np.ndarray) -> dict[str, float]:
    if not len(staleness):
        return {}
    ages, counts = np.unique(np.asarray(staleness, dtype=np.int64), return_counts=True)
    histogram = {f"staleness/hist/{age}": int(count) for age, count in zip(ages, counts, strict=True)}
    return {"staleness/mean": float(np.mean(staleness)), "staleness/max": float(np.max(staleness)), **histogram}


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {}
    exact = np.asarray(values, dtype=np.float64)
    return {f"{name}/mean": exact.mean(), f"{name}/max": exact.max(), f"{name}/min": exact.min()}


def _number(value: float) -> float:
    """A Python int where the value is whole by type, else a float; numpy's scalars do not go into JSON."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return int(value)
    return float(value)
