"""Scores on held-out prompts: groups of their own in the same flow, collected by the coordinator."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tranship.config import ValidationConfig
from tranship.dock import DockClient
from tranship.observe import ValidationRecord, When
from tranship.types import Prompt
from tranship.worker.describe import sample_record


def prompt_columns(prompt: Prompt, *, greedy: bool = False) -> dict[str, Any]:
    """A group's own columns, as admission puts them into the dock."""
    info = {
        "index": prompt.index,
        "text": prompt.text,
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "ability": prompt.ability,
        "extra_info": prompt.extra_info,
        "greedy": greedy,
    }
    return {"prompt": prompt.token_ids, "prompt_info": info}


class Validation:
    """One round of validation: admits every held-out prompt under sampling and (if asked) greedy, and gathers scores.

    Group ids are negative and differ from round to round, so that nothing mixes with training.
    """

    def __init__(
        self,
        dock: DockClient,
        prompts: Sequence[Prompt],
        config: ValidationConfig,
        *,
        when: When,
        step: int,
        decode: Callable[[np.ndarray], str],
    ) -> None:
        self._dock = dock
        self._decode = decode
        self._config = config
        self._when: When = when
        self._step = step
        self._start = time.monotonic()
        self._num_prompts = len(prompts)
        self._records: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
        self._greedy: dict[int, bool] = {}
        first = -1 - step * 2 * len(prompts)
        groups = []
        for greedy in (False, True) if config.greedy else (False,):
            size = 1 if greedy else config.samples_per_prompt
            for prompt in prompts:
                group_id = first - len(self._greedy)
                self._greedy[group_id] = greedy
                groups.append((group_id, size, "val", prompt_columns(prompt, greedy=greedy)))
        self._waiting = set(self._greedy)
        dock.admit(groups)

    def collect(self) -> ValidationRecord | None:
        """Gather what has been scored; the record once all of it has."""
        while self._waiting and self._dock.changed_since_last_take("validate"):
            batch = self._dock.take("validate", max_groups=len(self._waiting), kinds=("val",))
            if batch is None:
                break
            for group in batch.groups:
                for row in group.rows:
                    self._records[self._greedy[group.group_id]].append(sample_record(batch, row, self._decode))
                self._waiting.discard(group.group_id)
            self._dock.ack(batch.lease)
            self._dock.finish_val([group.group_id for group in batch.groups])
        return None if self._waiting else self._record()

    def samples(self) -> list[dict[str, Any]]:
        """All samples of the round, for people to read."""
        return [
            {**record, "greedy": greedy, "when": self._when, "step": self._step}
            for greedy in (False, True)
            for record in sorted(self._records[greedy], key=lambda r: (-r["group_id"], r["sample_index"]))
        ]

    def _record(self) -> ValidationRecord:
        sampled, greedy = self._records[False], self._records[True]
        by_source: defaultdict[str, list[float]] = defaultdict(list)
        for record in sampled:
            if record["status"] == "scored":
                by_source[record["data_source"]].append(record["score"])
        invalid = Counter(r["reason"] for r in [*sampled, *greedy] if r["status"] == "invalid")
        return ValidationRecord(
            when=self._when,
            step=self._step,
            score=_mean_score(sampled),
            score_greedy=_mean_score(greedy) if greedy else None,
            num_prompts=self._num_prompts,
            samples_per_prompt=self._config.samples_per_prompt,
            seconds=time.monotonic() - self._start,
            scores={source: float(np.mean(scores)) for source, scores in sorted(by_source.items())},
            extra=mean_extra(sampled),
            extra_greedy=mean_extra(greedy),
            invalid=dict(invalid),
        )


def _mean_score(records: list[dict[str, Any]]) -> float:
    """The mean score of the scored samples; nan if there is none."""
    scores = [record["score"] for record in records if record["status"] == "scored"]
    return float(np.mean(scores)) if scores else float("nan")


def mean_extra(records: list[dict[str, Any]]) -> dict[str, float]:
    """Means of the further numbers that the reward returned, over the scored samples that have them."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for record in records:
        if record["status"] == "scored":
            for name, value in record["extra"].items():
                if isinstance(value, bool | int | float):
                    values[name].append(float(value))
    return {name: float(np.mean(numbers)) for name, numbers in sorted(values.items())}
