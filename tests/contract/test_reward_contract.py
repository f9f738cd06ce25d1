"""What holds for every built-in reward function, wherever it runs."""

import inspect
import json
import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest

from tranship.lookup import resolve
from tranship.rewards import REWARDS, RewardPool
from tranship.rewards.scoring import to_score
from tranship.types import Score

GOLDS = ["42", "-5", "1234", "18", "72"]
TEXTS = [
    "#### 42",
    "#### 42" + "." * 400,
    "#### -5",
    "#### 1,234",
    "#### $18",
    "I think 72",
    "",
    r"\boxed{42}",
    "\ud800 é 72",
]
ROWS = [("gsm8k", text, gold, {"index": 1}) for gold in GOLDS for text in TEXTS]


def direct(name: str) -> list[Score]:
    function = resolve(name, REWARDS, "reward.function")
    return [to_score(function(*row)) for row in ROWS]


def pooled(name: str) -> list[Score]:
    with RewardPool(name, {}, 2, 10.0) as pool:
        return pool.score_all(ROWS)


@pytest.mark.parametrize("name", REWARDS)
def test_the_same_answers_in_a_thread_a_process_and_a_process_of_another_process(name: str):
    expected = direct(name)
    assert {score.value for score in expected} == {0.0, 1.0}
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(direct, name).result() == expected
    assert pooled(name) == expected
    with multiprocessing.get_context("spawn").Pool(1) as remote:
        assert remote.apply(pooled, (name,)) == expected


@pytest.mark.parametrize("name", REWARDS)
def test_the_signature_is_that_of_verl(name: str):
    function = resolve(name, REWARDS, "reward.function")
    names = list(inspect.signature(function).parameters)
    assert names[:4] == ["data_source", "solution_str", "ground_truth", "extra_info"]
    result = function(data_source="s", solution_str="1", ground_truth="1")
    assert 0 <= result["score"] <= 1
    assert result["well_formed"] in (0, 1)
    json.dumps(result)
