"""The one coordinator: it admits prompts, advances the version, validates and cuts. Workers obey."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tranship.config import Config
from tranship.data.stream import make_stream
from tranship.dock.messages import Kind
from tranship.observe import Recorder, StepRecord, ValidationRecord, When
from tranship.trainer.best import make_best_keeper
from tranship.trainer.checkpoint import Cut, write_cut
from tranship.trainer.columns import prompt_columns
from tranship.trainer.forecast import LengthForecast
from tranship.trainer.preflight import Report
from tranship.trainer.supervise import COMMAND_S, Supervisor
from tranship.trainer.validation import Validation, mean_extra
from tranship.types import RunError
from tranship.worker.describe import unpack_tokens

# Leases that are over are ended within this, or a quarter of their length.
_EXPIRY_S = 1.0
# Settings of rollout that leave what is sampled as it is.
_SAME_SCORES = {"engine", "group_size", "max_running", "on_update", "tensor_parallel", "cuda_graphs"}


class Coordinator:
    """Decides everything that must be decided once. `tick` handles what has happened since the last one.

    A step's order is: record it, cut if due, publish the weights, advance the dock, tell the samplers, validate if due,
    admit.
    """

    def __init__(
        self,
        report: Report,
        run_dir: Path,
        processes: Supervisor,
        recorder: Recorder,
        decode: Callable[[np.ndarray], str],
    ) -> None:
        self._config: Config = report.config
        self._run_dir = run_dir
        self._processes = processes
        self._dock = processes.dock
        self._trainer = processes.trainer
        self._num_workers = sum(plan.num_ranks for plan in report.workers)
        self._samples = "train" in next(row.kinds for row in report.table if row.name == "rollout")
        self._recorder = recorder
        self._decode = decode
        self._stream = make_stream(report.train, self._config.data, self._config.run.seed)
        self._digest = report.train.digest
        self._data_numbers = {name: float(count) for name, count in report.train.numbers.items()}
        self._val_prompts = report.val.prompts if report.val else []
        self._forecast = LengthForecast(self._config.rollout.max_response_tokens)
        self._val_forecast = LengthForecast(self._config.rollout.max_response_tokens)
        self._groups: dict[int, dict[str, Any]] = {}
        self._replaced: list[dict[str, Any]] = []
        self._best = make_best_keeper(run_dir, self._config.checkpoint, _measured_on(report))
        self._trained: deque[dict[str, Any]] = deque()
        self._validation: Validation | None = None
        self._invalid_steps = 0
        self._version = 0
        self._saved_version = -1
        self._step_start = time.monotonic()
        self._not_training_s = 0.0
        self._expiry_s = min(_EXPIRY_S, self._config.dock.lease_s / 4)
        self._next_expiry = 0.0
        self.done = False

    @property
    def version(self) -> int:
        """Batches trained and recorded."""
        return self._version

    def start(self, cut: Cut | None) -> None:
        """Begin at the start, or go on from a cut: the groups that were in flight then are admitted again."""
        again: list[int] = []
        if cut is not None:
            state = cut.state
            self._trainer.call("load", str(cut.folder), timeout_s=COMMAND_S)
            again = self._dock.restore(state["dock"])
            self._version = self._saved_version = state["version"]
            assert self._dock.version == self._version, (self._dock.version, self._version)
            self._stream.seek(state["position"])
            self._invalid_steps = state["invalid_steps"]
        self._processes.connect()
        self._processes.publish(self._version)
        self._processes.announce()
        self._profile(self._version + 1)
        self._admit_groups(again)
        if cut is None and self._is_due("before"):
            self._validate("before")
        elif self._version == self._config.train.steps:
            self._end_training()
        else:
            if self._is_due("during"):
                self._validate("during")
            self._admit()
        self._step_start = time.monotonic()

    def tick(self) -> None:
        """Handle what workers have said, and go on with validation."""
        self._drain()
        self._expire()
        if self._config.algorithm.dynamic_sampling and self._replaced and not self.done:
            self._check_refills()
            self._admit()
        if self._validation is not None:
            record = self._validation.collect()
            if record is not None:
                self._end_validation(record)
        while self._trained and self._validation is None and not self.done:
            self._finish_step(self._trained.popleft())

    def stop(self) -> Path | None:
        """Save the last completed step before the run ends early; returns the checkpoint (None: none is needed)."""
        # The answer comes between two steps of the trainer: what it has trained has been said by then.
        self._trainer.call("batches_trained", timeout_s=COMMAND_S)
        self._drain()
        while self._trained:
            self._record(self._trained.popleft())
        return self._cut() if self._version > self._saved_version and self._version > 0 else None

    def _drain(self) -> None:
        for _, event in self._processes.events():
            if event["kind"] == "group":
                prompt = self._stream.at(event["group_id"]).index
                self._forecast.observe(prompt, [sample["num_tokens"] for sample in event["samples"]])
                if self._config.algorithm.dynamic_sampling and event["outcome"] != "train":
                    self._replaced.append(event)
                else:
                    self._groups[event["group_id"]] = event
            elif event["kind"] == "trained":
                self._trained.append(event)

    def _expire(self) -> None:
        """Have the dock end the leases that are over. Any message does; where nobody speaks, this one."""
        if time.monotonic() >= self._next_expiry:
            self._dock.status()
            self._next_expiry = time.monotonic() + self._expiry_s

    def _finish_step(self, event: dict[str, Any]) -> None:
        self._record(event)
        last = self._version == self._config.train.steps
        every = self._config.checkpoint.every_steps
        if last or (every and self._version % every == 0):
            self._cut()
        validation = self._config.validation
        due = bool(validation.every_steps) and self._version % validation.every_steps == 0
        if self._samples or last or due:
            self._processes.publish(self._version)
        self._dock.advance(self._version)
        self._processes.announce()
        self._profile(self._version + 1)
        if last:
            self._end_training()
        else:
            if due and self._val_prompts:
                self._validate("during")
            self._admit()

    def _is_due(self, when: When) -> bool:
        """Whether a validation belongs here and is not recorded: a run that goes on from a cut may have made it."""
        validation = self._config.validation
        wanted = {
            "before": validation.before_training and self._version == 0,
            "during": bool(validation.every_steps)
            and self._version > 0
            and self._version % validation.every_steps == 0,
            "after": validation.after_training,
        }
        last = self._recorder.validated(when)
        return wanted[when] and bool(self._val_prompts) and (last is None or last["step"] != self._version)

    def _end_training(self) -> None:
        if self._is_due("after"):
            self._validate("after")
        elif not self._config.validation.after_training and self._is_due("during"):
            self._validate("during")
        else:
            self.done = True

    def _profile(self, step: int) -> None:
        if self._config.observe.profile_steps:
            self._processes.profile(step)

    def _admit_groups(self, group_ids: Sequence[int]) -> None:
        prompts = {group_id: self._stream.at(group_id) for group_id in group_ids}
        groups: list[tuple[int, int, Kind, dict[str, Any]]] = [
            (group_id, self._config.group_size, "train", prompt_columns(prompt)) for group_id, prompt in prompts.items()
        ]
        self._dock.admit(groups, [self._forecast.expect(prompt.index) for prompt in prompts.values()])

    def _admit(self) -> None:
        """As many groups as the bound allows, and the batches that are left still need."""
        status = self._dock.status()
        left = (self._config.train.steps - status.num_trained) * self._config.groups_per_step - status.num_unconsumed
        room = min(status.num_admissible, left)
        if room > 0:
            self._admit_groups([group_id for group_id, _ in self._stream.take(room)])

    def _check_refills(self) -> None:
        """Stop where hardly any prompt has a signal: replacing them would not end."""
        limit = self._config.algorithm.max_refills * self._config.groups_per_step
        if len(self._replaced) <= limit:
            return
        outcomes = Counter(event["outcome"] for event in self._replaced)
        scores = [sample["score"] for event in self._replaced for sample in event["samples"]]
        seen = Counter(scores).most_common(3)
        raise RunError(
            f"dynamic sampling replaced {len(self._replaced)} groups in one batch of "
            f"{self._config.groups_per_step} ({dict(outcomes)}; rewards seen most: {seen}) and it is not full: easier "
            "or more varied prompts are needed, or algorithm.dynamic_sampling=false, or a larger algorithm.max_refills"
        )

    def _validate(self, when: When) -> None:
        self._processes.fetch()
        self._validation = Validation(
            self._dock,
            self._val_prompts,
            self._config.validation,
            when=when,
            step=self._version,
            decode=self._decode,
            forecast=self._val_forecast,
        )

    def _end_validation(self, record: ValidationRecord) -> None:
        assert self._validation is not None
        self._processes.timings()  # What validation took is no part of the next step.
        self._recorder.validation(record)
        self._recorder.validation_samples(record.step, self._validation.samples())
        if self._best is not None and self._best.consider(record, record.step, self._export):
            self._recorder.event(
                "best", {"step": record.step}, say=f"the best so far, kept as {self._run_dir / 'best'}"
            )
        self._validation = None
        if record.when == "after" or self._version == self._config.train.steps:
            self.done = True
        elif record.when == "before":
            self._admit()
        self._not_training_s += record.seconds

    def _export(self, folder: str) -> None:
        self._trainer.call("export", folder, timeout_s=COMMAND_S)

    def _cut(self) -> Path:
        start = time.monotonic()
        state = {
            "version": self._version,
            "position": self._stream.position,
            "invalid_steps": self._invalid_steps,
            "data": self._digest,
            "dock": self._dock.snapshot(),
            "config": self._config.model_dump(mode="json"),
        }
        folder = write_cut(
            self._run_dir,
            self._version,
            save=lambda path: self._trainer.call("save", str(path), timeout_s=COMMAND_S),
            state=state,
            keep_last=self._config.checkpoint.keep_last,
        )
        self._saved_version = self._version
        self._not_training_s += time.monotonic() - start
        self._recorder.event("checkpoint", {"step": self._version, "folder": str(folder)})
        return folder

    def _record(self, event: dict[str, Any]) -> None:
        self._version = event["version"] + 1
        seconds = time.monotonic() - self._step_start - self._not_training_s
        self._step_start, self._not_training_s = time.monotonic(), 0.0
        groups = [self._groups.pop(group_id) for group_id in event["groups"] if group_id in self._groups]
        replaced, self._replaced = self._replaced, []
        groups = sorted([*groups, *replaced], key=lambda group: group["group_id"])
        samples = [unpack_tokens(sample) for group in groups for sample in group["samples"]]
        record = self._step_record(event, groups, samples, seconds, num_groups=len(event["groups"]) + len(replaced))
        self._recorder.step(record)
        self._processes.batch_trained()
        self._recorder.samples(self._version, samples)
        if self._samples:
            self._check_rewards(samples)

    def _step_record(
        self,
        event: dict[str, Any],
        groups: list[dict[str, Any]],
        samples: list[dict[str, Any]],
        seconds: float,
        *,
        num_groups: int,
    ) -> StepRecord:
        timings = self._processes.timings()
        rss = int(timings.pop("rss_bytes", 0))
        dock_wait = timings.pop("dock", 0.0)
        outcomes = Counter(group["outcome"] for group in groups)
        train = {**_means(group["metrics"] for group in groups), **event["metrics"]}
        return StepRecord(
            step=self._version,
            policy_version=self._version,
            num_groups=num_groups,
            num_groups_with_signal=outcomes["train"],
            rewards=np.array([_number(sample["score"]) for sample in samples]),
            raw_rewards=np.array([_number(sample["raw"]) for sample in samples]),
            statuses=[sample["status"] for sample in samples],
            reasons=[sample["reason"] for sample in samples],
            finish_reasons=[sample["finish_reason"] for sample in samples],
            response_lengths=np.array([sample["num_tokens"] for sample in samples], dtype=np.int64),
            prompt_lengths=np.array([sample["prompt_tokens"] for sample in samples], dtype=np.int64),
            advantages=np.array([sample["advantage"] for sample in samples], dtype=np.float32),
            staleness=np.array(event["staleness"], dtype=np.int64),
            logprob_gap_max=train.pop("logprob_gap_max", None),
            logprob_gap_mean=train.pop("logprob_gap_mean", None),
            tokens_generated=sum(sample["num_written"] for sample in samples),
            seconds=seconds,
            timings_s=timings,
            train=train,
            dropped_groups={reason: count for reason, count in outcomes.items() if reason != "train"},
            reward_extra=mean_extra(samples),
            reward_by_source=_by_source(samples),
            rollout_extra=_rollout_means(samples),
            data={**self._data_numbers, "position": float(self._stream.position), "epoch": float(self._stream.epoch)},
            dock_wait_s=dock_wait,
            rss_bytes=rss,
            num_devices=self._num_workers,
            ledger=self._ledger(),
        )

    def _ledger(self) -> dict[str, float]:
        """The dock's ledger as numbers by name; it has to balance (I1)."""
        counts = self._dock.ledger_counts()
        dropped = counts["dropped"]
        ended = counts["trained"] + sum(dropped.values())
        assert counts["admitted"] == ended + counts["in_flight"], f"the ledger does not balance: {counts}"
        numbers = {name: float(counts[name]) for name in ("admitted", "trained", "in_flight")}
        return numbers | {f"dropped/{reason}": float(count) for reason, count in dropped.items()}

    def _check_rewards(self, samples: list[dict[str, Any]]) -> None:
        if any(sample["status"] == "scored" for sample in samples):
            self._invalid_steps = 0
            return
        self._invalid_steps += 1
        if self._invalid_steps >= self._config.reward.max_invalid_steps:
            reasons = Counter(sample["reason"] or "masked" for sample in samples).most_common(3)
            said = "; ".join(f"{count} x {reason}" for reason, count in reasons) or "no sample was left"
            raise RunError(
                f"no sample of {self._invalid_steps} steps in a row could be scored by "
                f"reward.function {self._config.reward.function!r}: {said}"
            )


def _means(parts: Iterable[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """Means of metrics that come as (sum, weight)."""
    sums: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for part in parts:
        for name, (total, weight) in part.items():
            sums[name][0] += total
            sums[name][1] += weight
    return {name: total / weight for name, (total, weight) in sums.items() if weight}


def _by_source(samples: list[dict[str, Any]]) -> dict[str, float]:
    """Mean reward of the scored samples of each data source."""
    scores: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if sample["status"] == "scored":
            scores[sample["data_source"]].append(sample["score"])
    return {source: float(np.mean(values)) for source, values in sorted(scores.items())}


def _rollout_means(samples: list[dict[str, Any]]) -> dict[str, float]:
    """Means of the numbers that the rollout gave beside a sample's tokens (turns, tool calls, ...)."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, value in sample["rollout_info"].items():
            if isinstance(value, bool | int | float):
                values[name].append(float(value))
    return {name: float(np.mean(numbers)) for name, numbers in sorted(values.items())}


def _measured_on(report: Report) -> str:
    """What the scores of two validations have in common where they may be compared."""
    config = report.config
    settings = {
        "data": report.val.digest if report.val else "",
        "validation": config.validation.model_dump(mode="json", include={"samples_per_prompt", "correct_score"}),
        "rollout": config.rollout.model_dump(mode="json", exclude=_SAME_SCORES),
        "reward": config.reward.model_dump(mode="json", exclude={"num_workers", "timeout_s", "memory_mb"}),
        "env": config.env.model_dump(mode="json"),
    }
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=16).hexdigest()


def _number(score: float | None) -> float:
    return float("nan") if score is None else float(score)
