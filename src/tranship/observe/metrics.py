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
    Metric("rewards", "critic/score/mean|max|min", True, "the reward before any shaping, scored samples only"),
    Metric(
        "rewards",
        "critic/rewards/mean|max|min",
        True,
        "the reward after shaping; a KL in the reward is not in it (see actor/kl)",
    ),
    Metric("advantages", "critic/advantages/mean|max|min", True, "advantages of trained tokens or samples"),
    Metric("reward_extra.<name>", "reward_extra/<name>", False, "means of further numbers of the reward function"),
    Metric("reward_by_source.<source>", "reward_by_source/<source>", False, "mean score of the prompts of one source"),
    Metric("rollout_extra.<name>", "env/<name>", False, "means of what the environment counted: turns, tool_calls"),
    Metric("data.<name>", "data/<name>", False, "the prompt stream: epoch, position, prompts dropped"),
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
    Metric("train.critic_value_loss", "critic/vf_loss", True, "loss of the value model"),
    Metric("train.critic_value_clip_frac", "critic/vf_clipfrac", True, "share of tokens whose value the clip held"),
    Metric("train.critic_value_mean", "critic/vpred_mean", True, "mean value that the critic gave"),
    Metric("train.critic_return_mean", "critic/returns/mean", True, "mean return that it should give"),
    Metric("train.critic_<moments>", "critic/vf_explained_var", True, "1 - var(returns - values) / var(returns)"),
    Metric("train.critic_learning_rate", "critic/lr", True, "learning rate of the critic"),
    Metric("train.critic_<name>", "critic/<name>", False, "anything else of the critic (grad_norm as with verl)"),
    Metric("train.correction_<name>", "rollout_corr/<name>", False, "what the correction of stale samples did"),
    Metric("train.pair_<name>", "dpo/<name>", False, "preferences: accuracy, margin, chosen_reward, rejected_reward"),
    Metric("train.nll", "sft/nll", False, "demonstrations: nats per token"),
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
    Metric("train.num_tokens", "actor/num_tokens", False, "trained tokens (SFT, DPO: perf/total_num_tokens too)"),
    Metric("prompt_lengths, response_lengths", "perf/throughput", True, "those tokens per second and device"),
    Metric("tokens_generated", "perf/tokens_generated", False, "response tokens that the samplers made"),
    Metric("tokens_generated", "perf/generated_tokens_per_s", False, "those per second of wall time"),
    Metric("scores", "val-core/<source>/reward/mean@<n>", True, "validation: mean score under sampling"),
    Metric("by_source", "val-core/<source>/reward/best@<n>/mean", True, "mean of the best of n (exact; verl: drawn)"),
    Metric("by_source", "val-core/<source>/reward/maj@<n>/mean", True, "share of right majority answers of n"),
    Metric("by_source", "val-aux/<source>/reward/best@<k>/mean", True, "mean of the best of k samples, k < n"),
    Metric("by_source", "val-aux/<source>/pass@<k>", False, "chance that one of k samples is right"),
    Metric("statistics", "val/best@<k>, val/maj@<n>, val/pass@<k>", False, "the same over all sources"),
    Metric("statistics", "val/score_low, val/score_high", False, "95% interval of val/score, by prompts"),
    Metric("invalid.<reason>", "val/invalid/<reason>", False, "validation: invalid samples by reason"),
    Metric("masked", "val/masked", False, "validation: samples that the reward left out on purpose"),
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
    Metric(
        "ledger.<name>", "ledger/<name>", False, "groups of the run so far: admitted, trained, in_flight, dropped/..."
    ),
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
_TRAIN_PREFIXES = {"critic_": "critic/", "correction_": "rollout_corr/", "pair_": "dpo/"}
# The critic's second moments: what vf_explained_var is made of, and nothing to look at.
_ERROR_SQUARE, _RETURN_SQUARE = "critic_value_error_square", "critic_return_square"
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
    }
    metrics |= _spread("critic/score", record.scored_raw) | _spread("critic/rewards", record.scored_rewards)
    metrics |= _spread("critic/advantages", record.advantages)
    metrics |= _spread("response_length", record.response_lengths) | _spread("prompt_length", record.prompt_lengths)
    if num_samples:
        for status in ("scored", "masked", "invalid"):
            metrics[f"samples/{status}"] = sum(s == status for s in record.statuses)
        metrics |= {f"samples/invalid/{reason}": count for reason, count in record.invalid_by_reason.items()}
        metrics["response_length/clip_ratio"] = sum(r == "length" for r in record.finish_reasons) / num_samples
        metrics["response/aborted_ratio"] = sum(r == "abort" for r in record.finish_reasons) / num_samples
    metrics |= {f"reward_extra/{name}": value for name, value in record.reward_extra.items()}
    metrics |= {f"reward_by_source/{source}": value for source, value in record.reward_by_source.items()}
    metrics |= {f"env/{name}": value for name, value in record.rollout_extra.items()}
    metrics |= {f"data/{name}": value for name, value in record.data.items()}
    metrics |= {f"groups/dropped/{reason}": count for reason, count in record.dropped_groups.items()}
    metrics |= {f"ledger/{name}": value for name, value in record.ledger.items()}
    if record.num_groups:
        metrics["groups/with_signal_share"] = record.num_groups_with_signal / record.num_groups
    metrics |= _train_metrics(record.train, policy=record.has_rewards)
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
    metrics |= {"val/masked": record.masked} if record.masked else {}
    for source, found in record.by_source.items():
        metrics |= {_of_source(source, name, record.samples_per_prompt): e.value for name, e in found.items()}
    for name, estimate in record.statistics.items():
        if not name.startswith("mean@"):
            metrics[f"val/{name}"] = estimate.value
        elif estimate.low is not None and estimate.high is not None:
            metrics |= {"val/score_low": estimate.low, "val/score_high": estimate.high}
    return {name: _number(value) for name, value in metrics.items()}


def _of_source(source: str, name: str, num_samples: int) -> str:
    """The metric's name of one statistic of one source; those of all n samples are the core, as with verl."""
    kind, _, count = name.partition("@")
    if kind == "pass":
        return f"val-aux/{source}/{name}"
    group = "val-core" if int(count) == num_samples else "val-aux"
    return f"{group}/{source}/reward/{name}" + ("" if kind == "mean" else "/mean")


def _train_metrics(train: Mapping[str, float], *, policy: bool) -> dict[str, float]:
    """policy: the loss is one of a policy's samples; without a KL and an entropy term it is the policy term."""
    shown = {name: value for name, value in train.items() if name not in (_ERROR_SQUARE, _RETURN_SQUARE)}
    written = {_train_name(name): value for name, value in shown.items()} | _explained(train)
    if policy and "loss" in train and "kl" not in train and "entropy" not in train:
        written.setdefault("actor/pg_loss", train["loss"])
    return written


def _explained(train: Mapping[str, float]) -> dict[str, float]:
    """The share of the variance of the returns that the values explain; nothing where they do not vary."""
    if not {_ERROR_SQUARE, _RETURN_SQUARE, "critic_value_mean", "critic_return_mean"} <= train.keys():
        return {}
    returns = train["critic_return_mean"]
    variance = train[_RETURN_SQUARE] - returns**2
    unexplained = train[_ERROR_SQUARE] - (returns - train["critic_value_mean"]) ** 2
    # What a float32 mean of squares leaves of a variance that is 0.
    if variance <= 1e-6 * train[_RETURN_SQUARE]:
        return {}
    return {"critic/vf_explained_var": 1 - unexplained / variance}


def _train_name(name: str) -> str:
    if name in _TRAIN:
        return _TRAIN[name]
    for prefix, room in _TRAIN_PREFIXES.items():
        if name.startswith(prefix):
            return room + name.removeprefix(prefix)
    return f"actor/{name}"


def _speed(record: StepRecord) -> dict[str, float]:
    response_tokens = int(np.sum(record.response_lengths))
    num_prompts = len(record.prompt_lengths)
    samples_per_prompt = len(record.response_lengths) / num_prompts if num_prompts else 0.0
    total = response_tokens + int(np.sum(record.prompt_lengths) * samples_per_prompt)
    if not record.has_rewards:
        total = int(record.train.get("num_tokens", 0))  # Recorded responses: what the update counted.
    speed: dict[str, float] = {"perf/total_num_tokens": total}
    if record.seconds > 0:
        speed["perf/throughput"] = total / (record.seconds * record.num_devices)
        if record.has_rewards or record.tokens_generated:
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
