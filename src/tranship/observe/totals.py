"""Running sums of a run, fed with the lines of metrics.jsonl as they are logged, or read back after a restart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tranship.observe.jsonl import finite

_INVALID = "samples/invalid/"
# Over all sources: the 95% interval of the score, and what k samples of a prompt give.
_STATISTIC = re.compile(r"val/(score_low|score_high|(pass|best|maj)@[0-9]+)$")


class RunTotals:
    """What summary.json says about steps, speed, invalid samples and validations."""

    def __init__(self) -> None:
        self.steps = 0
        self.train_seconds = 0.0
        self.tokens_generated = 0
        self.updates = 0
        self.invalid: dict[str, int] = {}
        self._losses: list[float] = []  # The first and the last one of recorded responses.
        self.validations: dict[str, dict[str, Any]] = {}

    def add(self, kind: str, step: int, metrics: Mapping[str, Any]) -> None:
        """Count one line. Of several validations of one kind the last stands."""
        if kind != "step":
            self.validations[kind] = finite(metrics) | {"kind": kind, "step": step}
            return
        self.steps = max(self.steps, step)
        self.train_seconds += metrics["timing_s/step"]
        self.tokens_generated += int(metrics["perf/tokens_generated"])
        self.updates += (metrics.get("actor/grad_norm") or 0.0) > 0
        loss = metrics.get("actor/loss")
        if "samples/scored" not in metrics and loss is not None:
            self._losses = [*self._losses[:1], loss]
        for name, count in metrics.items():
            if name.startswith(_INVALID):
                reason = name.removeprefix(_INVALID)
                self.invalid[reason] = self.invalid.get(reason, 0) + int(count)

    def summary(self) -> dict[str, Any]:
        """The keys of summary.json that follow from the metrics; null where there was no such validation. A run that
        is trained on recorded responses has loss_first and loss_last too."""
        speed = self.tokens_generated / self.train_seconds if self.train_seconds > 0 else 0.0
        values: dict[str, Any] = {
            "steps": self.steps,
            "steps_with_update": self.updates,
            "train_seconds": round(self.train_seconds, 3),
            "tokens_generated": self.tokens_generated,
            "tokens_per_s": round(speed, 2),
            "invalid": self.invalid,
        }
        if self._losses:
            values |= finite({"loss_first": self._losses[0], "loss_last": self._losses[-1]})
        for when in ("before", "after"):
            metrics = self.validations.get(when, {})
            for key, name in (
                ("val", "val/score"),
                ("val_greedy", "val/score_greedy"),
                ("val_well_formed", "val/well_formed"),
                ("val_well_formed_greedy", "val/well_formed_greedy"),
            ):
                values[f"{key}_{when}"] = metrics.get(name)
            found = {name: value for name, value in metrics.items() if _STATISTIC.match(name)}
            if found:
                values[f"val_statistics_{when}"] = {name.removeprefix("val/"): value for name, value in found.items()}
        return values
