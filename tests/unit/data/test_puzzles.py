"""Puzzles of reasoning-gym: what is held out stays out, and their verifiers can be asked from the rows."""

import json
import sys
from typing import Any

import pytest
import reasoning_gym

from tranship.config.schema import MixturePartConfig
from tranship.data.rows import Row
from tranship.data.sources import load_rows
from tranship.types import UserError


def rows(task: str, limit: int | None = None, **args: Any) -> list[Row]:
    return load_rows(MixturePartConfig(source=f"reasoning_gym:{task}", args=args, limit=limit))


def questions(found: list[Row]) -> list[str]:
    return [row.prompt[0]["content"] for row in found]


@pytest.mark.parametrize("task", ["chain_sum", "leg_counting", "countdown"])
def test_a_rows_own_verifier_scores_its_answer(task: str):
    for row in rows(task, size=3):
        assert row.data_source == f"reasoning_gym/{task}"
        info = json.loads(json.dumps(row.extra_info))
        verifier = reasoning_gym.create_dataset(info["dataset"], **info["config"])
        assert verifier.score_answer(row.ground_truth, info["entry"]) == 1.0
        assert verifier.score_answer("wrong", info["entry"]) < 0.1
        assert row.prompt == [{"role": "user", "content": info["entry"]["question"]}]


# One digit each: so few questions that training draws held-out ones all the time.
FEW = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.mark.parametrize("seed", [0, 1, 1_935_017_423])
def test_no_held_out_question_is_trained_on(seed: int):
    held_out = questions(rows("chain_sum", split="val", num_val=40, **FEW))
    assert len(held_out) == len(set(held_out)) == 40
    train = rows("chain_sum", size=200, seed=seed, num_val=40, **FEW)
    assert len(train) == 200
    assert not set(questions(train)) & set(held_out)
    everything = questions(rows("chain_sum", size=200, seed=seed, num_val=0, **FEW))
    assert set(everything) & set(held_out)


def test_rows_are_the_same_each_time_and_differ_by_seed():
    assert rows("chain_sum", size=5) == rows("chain_sum", size=5, seed=0)
    assert questions(rows("chain_sum", size=5)) != questions(rows("chain_sum", size=5, seed=7))
    assert questions(rows("chain_sum", size=9))[:5] == questions(rows("chain_sum", size=5))
    assert len(rows("chain_sum", limit=2, size=5)) == 2


def test_settings_of_the_task_reach_it():
    (row,) = rows("chain_sum", size=1, min_terms=5, max_terms=5)
    assert row.extra_info["config"] == {"min_terms": 5, "max_terms": 5, "seed": 0}
    assert row.extra_info["entry"]["metadata"]["num_terms"] == 5


@pytest.mark.parametrize(
    ("task", "args", "message"),
    [
        ("chain_sun", {}, r"no task 'chain_sun': try chain_sum"),
        ("chain_sum", {"min_turms": 3}, "does not take .*min_turms"),
        ("chain_sum", {"min_terms": 0}, "does not take"),
        ("chain_sum", {"split": "test"}, "split is 'test'"),
        ("chain_sum", {"size": 0}, "size is 0"),
        ("chain_sum", {"num_val": "3"}, "num_val is '3'"),
        ("chain_sum", {"split": "val", "size": 3}, "leave size, seed out"),
        ("chain_sum", {"split": "val", "num_val": 1000, **FEW}, "different questions, and num_val is 1000"),
        ("arc_agi", {"size": 1, "num_val": 0}, "its verifier does not read JSON values"),
    ],
)
def test_what_is_wrong_is_said(task: str, args: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        rows(task, **args)


def test_a_missing_package_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"package reasoning-gym: pip install 'tranship\[data\]'"):
        rows("chain_sum")
