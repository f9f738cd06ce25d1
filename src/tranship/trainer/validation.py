"""Scores on held-out prompts: groups of their own in the same flow, collected by the coordinator."""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tranship.config import ValidationConfig
from tranship.dock import DockClient
from tranship.dock.messages import Kind
from tranship.observe import ValidationRecord, When
from tranship.observe.scores import PromptScores, by_source, statistics, why_no_majority
from tranship.trainer.columns import prompt_columns
from tranship.trainer.forecast import LengthForecast
from tranship.types import Prompt, reason_class
from tranship.worker.describe import sample_record

# The further entries of a reward's dict that hold what it read out of the response: the first one counts. Where a
# reward has several terms, its name stands before: "boxed/answer".
_ANSWERS = ("answer", "pred")
_ROUNDING = 1e-9


class Validation:
    """One round of validation: admits every held-out prompt under sampling and (if asked) greedy, and gathers scores.

    Group ids are negative and differ from round to round, so that nothing mixes with training. forecast: of the lengths
    of responses to these prompts, by (index, greedy); the round adds to it.
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
        forecast: LengthForecast,
    ) -> None:
        self._dock = dock
        self._decode = decode
        self._forecast = forecast
        self._config = config
        self._when: When = when
        self._step = step
        self._start = time.monotonic()
        self._num_prompts = len(prompts)
        self._records: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
        self._greedy: dict[int, bool] = {}
        self._prompts: dict[int, int] = {}
        first = -1 - step * 2 * len(prompts)
        groups: list[tuple[int, int, Kind, dict[str, Any]]] = []
        for greedy in (False, True) if config.greedy else (False,):
            size = 1 if greedy else config.samples_per_prompt
            for prompt in prompts:
                group_id = first - len(self._greedy)
                self._greedy[group_id], self._prompts[group_id] = greedy, prompt.index
                groups.append((group_id, size, "val", prompt_columns(prompt, greedy=greedy)))
        self._waiting = set(self._greedy)
        dock.admit(groups, [forecast.expect(self._key(group_id)) for group_id, *_ in groups])

    @property
    def num_done(self) -> int:
        """Groups that have been scored; a prompt has one, and one more where it is answered greedily too."""
        return len(self._greedy) - len(self._waiting)

    @property
    def num_groups(self) -> int:
        """Groups that the round scores."""
        return len(self._greedy)

    def collect(self) -> ValidationRecord | None:
        """Gather what has been scored; the record once all of it has."""
        while self._waiting and self._dock.changed_since_last_take("validate"):
            batch = self._dock.take("validate", max_groups=len(self._waiting), kinds=("val",))
            if batch is None:
                break
            for group in batch.groups:
                records = [sample_record(batch, row, self._decode) for row in group.rows]
                self._records[self._greedy[group.group_id]] += records
                self._forecast.observe(self._key(group.group_id), [record["num_tokens"] for record in records])
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

    def _key(self, group_id: int) -> tuple[int, bool]:
        return self._prompts[group_id], self._greedy[group_id]

    def _record(self) -> ValidationRecord:
        sampled, greedy = self._records[False], self._records[True]
        num_samples, least = self._config.samples_per_prompt, self._config.correct_score
        prompts, prompts_greedy = prompt_scores(sampled, least), prompt_scores(greedy, least)
        overall, overall_greedy = statistics(prompts, num_samples), statistics(prompts_greedy, 1)
        sources = by_source(prompts, num_samples)
        mean = f"mean@{num_samples}"
        everything = [*sampled, *greedy]
        return ValidationRecord(
            when=self._when,
            step=self._step,
            score=overall[mean].value if mean in overall else float("nan"),
            score_greedy=(overall_greedy["mean@1"].value if overall_greedy else float("nan")) if greedy else None,
            num_prompts=self._num_prompts,
            samples_per_prompt=num_samples,
            seconds=time.monotonic() - self._start,
            scores={source: found[mean].value for source, found in sources.items() if mean in found},
            extra=mean_extra(sampled),
            extra_greedy=mean_extra(greedy),
            invalid=dict(Counter(reason_class(r["reason"]) for r in everything if r["status"] == "invalid")),
            masked=sum(r["status"] == "masked" and _held_out_score(r) is None for r in everything),
            statistics=overall,
            statistics_greedy=overall_greedy,
            by_source=sources,
            by_source_greedy=by_source(prompts_greedy, 1),
            no_majority=why_no_majority(prompts) if num_samples > 1 else "",
        )


def prompt_scores(records: Sequence[Mapping[str, Any]], correct_score: float) -> list[PromptScores]:
    """The scored samples of each prompt, prompts by group id; a prompt whose samples were all left out is there too.

    Held-out samples count with their score before any shaping, also where a response that reached its cap is kept out
    of the loss: what training makes of a score says nothing about the model. A sample is right if that is at least
    `correct_score`. Its answer is the "answer" that the reward returned beside the score, or "pred", as functions made
    for verl call it.
    """
    groups: dict[int, list[Mapping[str, Any]]] = {}
    for record in sorted(records, key=lambda r: (-r["group_id"], r["sample_index"])):
        groups.setdefault(record["group_id"], []).append(record)
    found = []
    for group in groups.values():
        scored = [(record, score) for record in group if (score := _held_out_score(record)) is not None]
        found.append(
            PromptScores(
                source=group[0]["data_source"],
                scores=[score for _, score in scored],
                correct=[score >= correct_score - _ROUNDING for _, score in scored],
                answers=[_answer(record["extra"]) for record, _ in scored],
            )
        )
    return found


def mean_extra(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Means of the further numbers that the reward returned, over the scored samples that have them. An answer may be a
    number too, but its mean says nothing."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for record in records:
        if record["status"] == "scored":
            for name, value in record["extra"].items():
                if not _is_answer(name) and isinstance(value, bool | int | float):
                    values[name].append(float(value))
    return {name: float(np.mean(numbers)) for name, numbers in sorted(values.items())}


def _held_out_score(record: Mapping[str, Any]) -> float | None:
    """The score before any shaping; None for an invalid sample, and for one that the reward itself left out."""
    if record["status"] == "invalid":
        return None
    score = record["score"] if record["raw"] is None else record["raw"]
    return None if score is None else float(score)


def _is_answer(name: str) -> bool:
    return name.rpartition("/")[2] in _ANSWERS


def _answer(extra: Mapping[str, Any]) -> str | None:
    """The answer as text; None where there is none. Answers are compared as the reward spells them."""
    answer = next((value for name, value in extra.items() if _is_answer(name) and value not in (None, "")), None)
    if answer is None:
        return None
    return answer if isinstance(answer, str) else json.dumps(answer, sort_keys=True)
