"""What a validation makes of its samples: who votes, who is right, who is left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tranship.config import ValidationConfig
from tranship.trainer.forecast import LengthForecast
from tranship.trainer.validation import Validation, mean_extra, prompt_scores
from tranship.types import Prompt


def sample(group_id: int, index: int, score: float | None, **changes: Any) -> dict[str, Any]:
    values = {
        "group_id": group_id,
        "sample_index": index,
        "data_source": "sums",
        "status": "scored" if score is not None else "invalid",
        "reason": "" if score is not None else "timeout",
        "score": score,
        "raw": score,
        "extra": {},
    }
    return values | changes


def test_samples_are_gathered_by_group_whatever_their_order() -> None:
    records = [sample(-2, 1, 0.0), sample(-1, 0, 1.0), sample(-2, 0, 1.0), sample(-1, 1, 1.0)]
    for order in (records, records[::-1]):
        found = prompt_scores(order, 1.0)
        assert [list(prompt.scores) for prompt in found] == [[1.0, 1.0], [1.0, 0.0]]
        assert [list(prompt.correct) for prompt in found] == [[True, True], [True, False]]


def test_left_out_samples_are_no_zeros() -> None:
    records = [sample(-1, 0, None), sample(-1, 1, 1.0), sample(-2, 0, None, status="masked")]
    found = prompt_scores(records, 1.0)
    assert [list(prompt.scores) for prompt in found] == [[1.0], []]


def test_shaping_is_for_training_and_not_for_held_out_scores() -> None:
    penalised = [sample(-1, 0, 0.5, raw=1.0), sample(-1, 1, 1.0, raw=0.5), sample(-1, 2, 0.7, raw=None)]
    found = prompt_scores(penalised, 1.0)[0]
    assert list(found.scores) == [1.0, 0.5, 0.7]
    assert list(found.correct) == [True, False, False]
    assert list(prompt_scores(penalised, 0.5)[0].correct) == [True, True, True]


def test_a_response_that_training_masks_because_it_was_cut_still_counts() -> None:
    records = [sample(-1, 0, 1.0), sample(-1, 1, None, status="masked", raw=0.0)]
    assert list(prompt_scores(records, 1.0)[0].scores) == [1.0, 0.0]


def test_answers_come_from_the_reward() -> None:
    extras = [{"answer": "7"}, {"pred": "7"}, {"answer": 7}, {"answer": None}, {"answer": ""}, {}, {"answer": [1, 2]}]
    extras += [{"format/score": 1.0, "boxed/answer": "7"}]
    records = [sample(-1, index, 0.0, extra=extra) for index, extra in enumerate(extras)]
    assert list(prompt_scores(records, 1.0)[0].answers) == ["7", "7", "7", None, None, None, "[1, 2]", "7"]


def test_an_answer_that_is_a_number_has_no_mean() -> None:
    records = [sample(-1, i, 1.0, extra={"a/answer": 100.0 * i, "well_formed": i, "pred": 5}) for i in range(2)]
    assert mean_extra(records) == {"well_formed": 0.5}


class FakeDock:
    """Answers as told: one batch with everything, or nothing yet."""

    def __init__(self) -> None:
        self.admitted: list[tuple[int, int, str, dict[str, Any]]] = []
        self.ready = False
        self.finished: list[int] = []

    def admit(self, groups: list[tuple[int, int, str, dict[str, Any]]], expected_tokens: list[int]) -> None:
        self.admitted += groups
        self.expected = expected_tokens

    def changed_since_last_take(self, stage: str) -> bool:
        return self.ready

    def take(self, stage: str, **_: Any) -> Any:
        self.ready = False
        return FakeBatch(self.admitted)

    def ack(self, lease: int) -> None:
        assert lease == 5

    def finish_val(self, groups: list[int]) -> None:
        self.finished += groups


class FakeBatch:
    """Every admitted group, scored: the sample of index i says i, and 0 is right."""

    lease = 5

    def __init__(self, admitted: list[tuple[int, int, str, dict[str, Any]]]) -> None:
        from tranship.types import SampleId

        self.ids = [SampleId(group_id, i) for group_id, size, _, _ in admitted for i in range(size)]
        rows = iter(range(len(self.ids)))
        self.groups = [FakeGroup(group_id, [next(rows) for _ in range(size)]) for group_id, size, _, _ in admitted]
        info = {group_id: columns["prompt_info"] for group_id, _, _, columns in admitted}
        self.columns = {
            "prompt_info": [info[sample.group_id] for sample in self.ids],
            "reward": [self.reward(sample.sample_index) for sample in self.ids],
            "response": [np.zeros(2, dtype=np.int32) for _ in self.ids],
            "prompt": [np.zeros(3, dtype=np.int32) for _ in self.ids],
            "finish_reason": ["stop" for _ in self.ids],
            "rollout_info": [{} for _ in self.ids],
        }

    @staticmethod
    def reward(index: int) -> dict[str, Any]:
        if index == 3:
            return {"status": "invalid", "value": None, "raw": None, "reason": "timeout", "extra": {}}
        right = float(index == 0)
        return {"status": "scored", "value": right, "raw": right, "reason": "", "extra": {"answer": str(min(index, 1))}}

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]


class FakeGroup:
    """A group of a FakeBatch."""

    def __init__(self, group_id: int, rows: list[int]) -> None:
        self.group_id = group_id
        self.rows = rows


@pytest.fixture
def prompts() -> list[Prompt]:
    return [Prompt(i, np.arange(3, dtype=np.int32), f"prompt {i}", "ab"[i % 2], ground_truth=i) for i in range(4)]


def test_a_round_of_validation(prompts: list[Prompt]) -> None:
    dock = FakeDock()
    config = ValidationConfig(samples_per_prompt=4, greedy=True)
    forecast = LengthForecast(64)
    forecast.observe((1, True), [9])
    round_ = Validation(
        dock,  # type: ignore[arg-type]
        prompts,
        config,
        when="during",
        step=3,
        decode=lambda _: "text",
        forecast=forecast,
    )
    assert dock.expected == [9] * 8, "what is not known is as long as the others"
    assert round_.collect() is None
    assert (round_.num_done, round_.num_groups) == (0, 8)
    dock.ready = True
    record = round_.collect()
    assert record is not None
    assert (round_.num_done, round_.num_groups) == (8, 8)
    assert forecast.expect((0, False)) == 2
    assert forecast.expect((1, True)) == round(9 + 0.3 * (2 - 9))
    assert sorted(dock.finished) == sorted(group_id for group_id, *_ in dock.admitted)
    assert record.score == pytest.approx(1 / 3), "three of four samples were scored, one of them right"
    assert record.score_greedy == 1.0
    assert record.scores == {"a": pytest.approx(1 / 3), "b": pytest.approx(1 / 3)}
    assert record.invalid == {"timeout": 4}
    assert record.statistics["pass@2"].value == pytest.approx(2 / 3)
    assert "pass@4" not in record.statistics, "no prompt has four scored samples"
    assert "maj@4" not in record.statistics
    assert record.statistics_greedy["mean@1"].num_prompts == 4
    assert record.by_source_greedy["a"]["mean@1"].num_prompts == 2
    samples = round_.samples()
    assert [sample["greedy"] for sample in samples] == [False] * 16 + [True] * 4
    assert samples[0]["input"] == "prompt 0"


def test_rounds_do_not_share_group_ids(prompts: list[Prompt]) -> None:
    seen: set[int] = set()
    for step in range(3):
        dock = FakeDock()
        Validation(
            dock,  # type: ignore[arg-type]
            prompts,
            ValidationConfig(),
            when="during",
            step=step,
            decode=str,
            forecast=LengthForecast(64),
        )
        ids = {group_id for group_id, *_ in dock.admitted}
        assert len(ids) == 8
        assert max(ids) < 0
        assert not ids & seen
        seen |= ids
