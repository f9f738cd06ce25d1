"""TRL's signature of lists, one sample at a time."""

from pathlib import Path
from typing import Any

import pytest

from tranship.rewards import RewardPool, RewardRequest, Term
from tranship.types import Score, UserError

FUNCTIONS = """
def lengths(completions, **kwargs):
    return [float(len(completion)) for completion in completions]

def sees(prompts, completions, completion_ids, solution, difficulty, factor=1):
    return [{"score": factor, "got": [prompts, completions, completion_ids, solution, difficulty]}]

def conversation(prompts, completions, **kwargs):
    return [float(prompts[0][-1]["content"] == "hi" and completions[0][0]["content"] == "there")]

def names(prompts, completions, **kwargs):
    return [{"score": 1, "names": sorted(kwargs)}]

async def sometimes(completions, ground_truth, **kwargs):
    return [None if completion == "skip" else float(completion == truth)
            for completion, truth in zip(completions, ground_truth)]

def one(data_source, solution_str, ground_truth, extra_info=None):
    return 5

def wrong(completions, **kwargs):
    return 1.0

def needs(completions, nothing_like_it):
    return [1.0]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trl") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def scores(file: Path, name: str, *requests: RewardRequest, beside: str | None = None, **args: Any) -> list[Score]:
    terms = [Term(name, f"trl:{file}:{name}", args)]
    if beside:
        terms.append(Term(beside, f"{file}:{beside}"))
    with RewardPool(terms, 1, 5.0) as pool:
        return pool.score_all(list(requests))


def test_lists_of_one(file: Path):
    requests = [RewardRequest("s", "abc"), RewardRequest("s", "")]
    assert [score.value for score in scores(file, "lengths", *requests)] == [3.0, 0.0]


def test_columns_and_arguments(file: Path):
    request = RewardRequest("s", "4", "4", {"difficulty": 2, "other": 3}, prompt="2+2", completion_ids=[7, 8])
    (score,) = scores(file, "sees", request, truth_column="solution", factor=3)
    assert score == Score("scored", 3.0, extra={"got": [["2+2"], ["4"], [[7, 8]], ["4"], [2]]})
    (score,) = scores(file, "names", request)
    assert score.extra["names"] == ["completion_ids", "data_source", "difficulty", "ground_truth", "other"]


def test_a_conversation_stays_one(file: Path):
    request = RewardRequest("s", "there", messages=[{"role": "user", "content": "hi"}])
    assert scores(file, "conversation", request)[0].value == 1.0


def test_none_means_that_the_term_does_not_apply(file: Path):
    requests = [RewardRequest("s", text, "7") for text in ("7", "8", "skip")]
    assert [score.value for score in scores(file, "sometimes", *requests, beside="one")] == [6.0, 5.0, 5.0]
    alone = scores(file, "sometimes", *requests)
    assert [score.status for score in alone] == ["scored", "scored", "masked"]


def test_what_is_no_list_of_one_is_invalid(file: Path):
    (score,) = scores(file, "wrong", RewardRequest("s", "x"))
    assert score.reason == "ValueError: a TRL reward of one sample returned 1.0, not a list of one number"


def test_a_column_that_is_not_there_is_named(file: Path):
    (score,) = scores(file, "needs", RewardRequest("s", "x"))
    assert "nothing_like_it" in score.reason


def test_a_name_that_is_not_there_is_refused(file: Path):
    with pytest.raises(UserError, match="has no 'absent'"):
        scores(file, "absent")
