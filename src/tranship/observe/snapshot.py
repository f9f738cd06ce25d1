"""Steps at which a run goes wrong, kept whole: RUN/snapshots/step-N with every text, reward and log-prob."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tranship.config.schema import ObserveConfig
from tranship.observe.jsonl import JsonlWriter, finite, read_jsonl
from tranship.observe.metrics import step_metrics
from tranship.observe.record import StepRecord

# Arrays of one number per response token: in snapshots only, samples.jsonl goes without them.
TOKEN_FIELDS = ("token_ids", "logprobs", "ref_logprobs", "response_mask", "advantages")

MOST_SNAPSHOTS = 10
MOST_SAMPLES = 256
_DECAY = 0.9
_LEAST_STEPS = 5
_DEVIATIONS = 2.0
# |trainer - sampler| of one token: bf16 stays far below the first in the mean and below the second at worst.
_GAP_MEAN, _GAP_MAX = 0.1, 3.0
_KL = ("kl", "approx_kl")
_DIGITS = 6


def snapshots_wanted(observe: ObserveConfig) -> bool:
    """Whether a run may write snapshots, so that its samples should bring TOKEN_FIELDS; False: all is switched off."""
    return observe.snapshot_reward_drop > 0 or observe.snapshot_kl > 0


class Snapshot(NamedTuple):
    """A snapshot that was written. reasons: one sentence each."""

    folder: Path
    reasons: tuple[str, ...]


class RunningMean:
    """Exponential mean and deviation: each value weighs 0.9 times the one after it, all weights add up to 1."""

    def __init__(self) -> None:
        self.count = 0
        self._weight = self._sum = self._squares = 0.0

    def add(self, value: float) -> None:
        """Count one more value."""
        self.count += 1
        self._weight = _DECAY * self._weight + 1.0
        self._sum = _DECAY * self._sum + value
        self._squares = _DECAY * self._squares + value * value

    @property
    def mean(self) -> float:
        """The weighted mean; at least one value is needed."""
        return self._sum / self._weight

    @property
    def deviation(self) -> float:
        """The weighted standard deviation of the values."""
        return math.sqrt(max(0.0, self._squares / self._weight - self.mean**2))


class SnapshotWatch:
    """Looks at each step and keeps those that look like an accident, at most 10 in a run's folder.

    A step is kept when its mean reward lies below (1 - observe.snapshot_reward_drop) times the running mean of the
    steps before it, and more than 2 of their deviations below it (5 steps at least, a running mean above 0); when
    train's kl or approx_kl is above observe.snapshot_kl; or when the log-probs of trainer and sampler are further
    apart than arithmetic explains (mean above 0.1, or a token above 3). What goes on for several steps is kept once.
    """

    def __init__(self, observe: ObserveConfig, run_dir: Path) -> None:
        """run_dir: its metrics.jsonl, if any, has the steps before."""
        self._wanted = snapshots_wanted(observe)
        self._reward_drop = observe.snapshot_reward_drop
        self._kl = observe.snapshot_kl
        self._folder = run_dir / "snapshots"
        self._rewards = RunningMean()
        self._going_on: set[str] = set()
        for row in read_jsonl(run_dir / "metrics.jsonl"):
            if row["kind"] == "step" and row.get("critic/score/mean") is not None:
                self._rewards.add(row["critic/score/mean"])

    def look(self, record: StepRecord, samples: Sequence[Mapping[str, Any]]) -> Snapshot | None:
        """Count the step, and write it if something has just gone wrong; None otherwise, or when 10 are there.

        samples: as `Recorder.samples` takes them, with those of TOKEN_FIELDS that there are, arrays or lists [T].
        Raises OSError if the snapshot cannot be written.
        """
        found = self._found(record)
        rewards = record.scored_rewards
        if len(rewards):
            self._rewards.add(float(rewards.mean()))
        new = [reason for kind, reason in found.items() if kind not in self._going_on]
        self._going_on = set(found)
        if not new or not self._wanted or self._num_kept(record.step) >= MOST_SNAPSHOTS:
            return None
        return Snapshot(self._write(record, samples, new), tuple(new))

    def _found(self, record: StepRecord) -> dict[str, str]:
        """Kind -> sentence, of all that is wrong with the step."""
        found: dict[str, str] = {}
        rewards, before = record.scored_rewards, self._rewards
        if len(rewards) and self._reward_drop and before.count >= _LEAST_STEPS and before.mean > 0:
            bound = min((1 - self._reward_drop) * before.mean, before.mean - _DEVIATIONS * before.deviation)
            mean = float(rewards.mean())
            if mean < bound:
                found["reward"] = f"the mean reward fell to {mean:.4g}, after a running mean of {before.mean:.4g}"
        for name in _KL:
            kl = record.train.get(name)
            if self._kl and kl is not None and not kl <= self._kl:
                found[name] = f"{name} is {kl:.4g}, above observe.snapshot_kl {self._kl:g}"
        for name, gap, bound in (
            ("mean", record.logprob_gap_mean, _GAP_MEAN),
            ("max", record.logprob_gap_max, _GAP_MAX),
        ):
            if gap is not None and not gap <= bound:
                found[f"gap {name}"] = f"log-probs of trainer and sampler differ by {gap:.4g} ({name}), above {bound:g}"
        return found

    def _num_kept(self, step: int) -> int:
        """Snapshots of other steps: one of this step would be written anew."""
        return sum(path.name != f"step-{step}" for path in self._folder.glob("step-*"))

    def _write(self, record: StepRecord, samples: Sequence[Mapping[str, Any]], reasons: list[str]) -> Path:
        folder = self._folder / f"step-{record.step}"
        temporary = self._folder / f"part-step-{record.step}"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        kept = sorted(samples, key=_badness)[:MOST_SAMPLES]
        writer = JsonlWriter(temporary / "samples.jsonl")
        for sample in kept:
            writer.write(finite({name: _plain(value) for name, value in sample.items()}))
        writer.close()
        about = {
            "step": record.step,
            "reasons": reasons,
            "num_samples": len(samples),
            "num_written": len(kept),
            "metrics": finite(step_metrics(record)),
        }
        (temporary / "snapshot.json").write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        temporary.rename(folder)
        return folder


def _badness(sample: Mapping[str, Any]) -> float:
    """Sorts samples without a score first, then the lowest scores."""
    score = sample.get("score")
    return -math.inf if score is None or math.isnan(score) else float(score)


def _plain(value: Any) -> Any:
    """A list for an array: whole numbers as they are, others to 6 digits (None where they are not finite)."""
    if not isinstance(value, np.ndarray):
        return value
    if value.dtype.kind in "bui":
        return value.tolist()
    return [round(number, _DIGITS) if math.isfinite(number) else None for number in value.tolist()]
