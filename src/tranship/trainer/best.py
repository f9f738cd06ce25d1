"""RUN/best: the model of the best validation so far, and best.json in it, which says why it is there.

A new one is written beside it under a temporary name, and takes its place by renaming; at any moment one of them is
whole under a name that the next start finds.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError

from tranship.config import CheckpointConfig, Config
from tranship.observe import ValidationRecord
from tranship.types import RunError, UserError

_SOURCE = "score/"


def check_best_metric(config: Config, sources: Collection[str]) -> None:
    """Raise UserError if checkpoint.best_metric can never be measured. sources: of the held-out prompts."""
    metric, validation = config.checkpoint.best_metric, config.validation
    if metric is None:
        return
    if not sources:
        raise UserError(
            f"checkpoint.best_metric {metric!r} is measured on held-out prompts: set data.val, or best_metric=null"
        )
    if not (validation.every_steps or validation.before_training or validation.after_training):
        raise UserError(
            f"checkpoint.best_metric {metric!r} is measured by validations, and there are none: set "
            "validation.every_steps, or best_metric=null"
        )
    known = ["score", *(["score_greedy"] if validation.greedy else []), *(_SOURCE + name for name in sorted(sources))]
    if metric not in known:
        raise _unknown(metric, known, " (score_greedy needs validation.greedy)" if metric == "score_greedy" else "")


def make_best_keeper(run_dir: Path, checkpoint: CheckpointConfig, measured_on: str = "") -> BestKeeper | None:
    """The keeper of RUN/best as configured; None where no metric is named. measured_on: see BestKeeper."""
    if checkpoint.best_metric is None:
        return None
    return BestKeeper(run_dir, checkpoint.best_metric, checkpoint.best_mode, measured_on)


class BestKeeper:
    """Keeps RUN/best. A run that goes on compares with the value that best.json has, if it is of the same metric and
    mode, also where the steps after its checkpoint are done again: that model was there, and was measured.

    measured_on: names prompts and settings of the validations; values that were measured on others are not compared.
    """

    def __init__(self, run_dir: Path, metric: str, mode: Literal["max", "min"], measured_on: str = "") -> None:
        self._folder = run_dir / "best"
        self._part = run_dir / ".best.part"
        self._old = run_dir / ".best.old"
        self._metric = metric
        self._measured_on = measured_on
        self._mode = mode
        if self._old.exists() and not self._folder.exists():
            self._old.rename(self._folder)
        for leftover in (self._part, self._old):
            shutil.rmtree(leftover, ignore_errors=True)
        self._best = _read(self._folder / "best.json", metric, mode, measured_on)

    @property
    def best(self) -> float | None:
        """The metric's best value so far; None before the first."""
        return self._best

    def consider(self, record: ValidationRecord, step: int, export: Callable[[str], None]) -> bool:
        """Put the current model into RUN/best if this validation is better than all before; returns whether it is.

        export(folder) writes the model as a Hugging Face folder. Of equal values the first stays; NaN is never best.
        UserError for a metric that the record does not have; RunError if the model cannot be written.
        """
        value = _value(record, self._metric)
        if math.isnan(value) or (self._best is not None and not self._better(value, self._best)):
            return False
        facts = {"metric": self._metric, "mode": self._mode, "value": value, "step": step, "when": record.when}
        facts["measured_on"] = self._measured_on
        try:
            shutil.rmtree(self._part, ignore_errors=True)
            export(str(self._part))
            (self._part / "best.json").write_text(json.dumps(facts, indent=1) + "\n")
            _sync(self._part)
            if self._folder.exists():
                self._folder.rename(self._old)
            self._part.rename(self._folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(self._part, ignore_errors=True)
            kept = "the one before stays" if self._folder.exists() or self._old.exists() else "there is none yet"
            raise RunError(
                f"the best model (step {step}) could not be written to {self._folder}: {error}; {kept}"
            ) from error
        shutil.rmtree(self._old, ignore_errors=True)
        self._best = value
        return True

    def _better(self, value: float, than: float) -> bool:
        return value > than if self._mode == "max" else value < than


def _value(record: ValidationRecord, metric: str) -> float:
    if metric == "score":
        return record.score
    if metric == "score_greedy" and record.score_greedy is not None:
        return record.score_greedy
    source = metric.removeprefix(_SOURCE)
    if metric.startswith(_SOURCE) and source in record.scores:
        return record.scores[source]
    if metric.startswith(_SOURCE) and source in record.by_source:
        return math.nan  # A source that is there, but of which nothing could be scored this time.
    known = ["score", *(["score_greedy"] if record.score_greedy is not None else [])]
    raise _unknown(metric, [*known, *(_SOURCE + name for name in sorted({*record.scores, *record.by_source}))])


def _unknown(metric: str, known: list[str], why: str = "") -> UserError:
    return UserError(f"checkpoint.best_metric: {metric!r} is not measured{why}; use one of: {', '.join(known)}")


def _read(path: Path, metric: str, mode: str, measured_on: str) -> float | None:
    """The value that an earlier process left, if it can be compared."""
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): repair it, or move {path.parent} away") from error
    value = facts.get("value")
    same = [facts.get(key) for key in ("metric", "mode", "measured_on")] == [metric, mode, measured_on]
    return float(value) if same and isinstance(value, int | float) else None


def _sync(folder: Path) -> None:
    for path in [*(path for path in folder.rglob("*") if path.is_file()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
