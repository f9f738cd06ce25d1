"""What a function may ask for, and how several of them make one score."""

import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tranship.config import RewardConfig, RewardTermConfig
from tranship.rewards import RewardPool, RewardRequest, Term, make_pool, terms_of
from tranship.rewards.calls import load
from tranship.rewards.terms import combine, short_name
from tranship.types import Score, UserError

FUNCTIONS = """
import os, time

def asks(data_source, solution_str, ground_truth, extra_info=None, *, prompt, messages, num_tokens, finish_reason,
         max_response_tokens, completion_ids, rollout_info):
    return {"score": 1, "got": [prompt, messages, num_tokens, finish_reason, max_response_tokens, completion_ids,
                                rollout_info]}

def asks_one(a, b, c, d, num_tokens=0, **kwargs):
    return {"score": num_tokens, "others": sorted(kwargs)}

def own_prompt(data_source, solution_str, ground_truth, extra_info=None, prompt=""):
    return {"score": 0, "prompt": prompt}

class Counts:
    def __init__(self, start=0):
        if start < 0:
            raise ValueError("start is negative")
        self.calls = start
    def __call__(self, data_source, solution_str, ground_truth, extra_info=None):
        self.calls += 1
        return self.calls

def half(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 0.5, "seen": 1}

def one(data_source, solution_str, ground_truth, extra_info=None):
    return 1

def by_kind(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "mask":
        return {"masked": True}
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "sleep":
        time.sleep(60)
    if solution_str == "slow":
        time.sleep(0.7)
    if solution_str == "huge":
        return 9e99
    return None if solution_str == "none" else 2
"""

REQUEST = RewardRequest(
    "s",
    "text",
    "7",
    {"a": 1},
    prompt="2 + 5?",
    messages=[{"role": "user", "content": "2 + 5?"}],
    num_tokens=3,
    finish_reason="length",
    max_response_tokens=9,
    completion_ids=[4, 5, 6],
    rollout_info={"num_turns": 2},
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("terms") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def config(file: Path, *terms: dict[str, Any], function: str = "none", **more: Any) -> RewardConfig:
    made = tuple(RewardTermConfig(**{**term, "function": f"{file}:{term['function']}"}) for term in terms)
    name = function if function == "none" else f"{file}:{function}"
    return RewardConfig(function=name, terms=made, **more)


def test_a_function_gets_by_name_what_it_asks_for(file: Path):
    with RewardPool([Term("asks", f"{file}:asks")], 1, 5.0) as pool:
        (score,) = pool.score_all([REQUEST])
    assert score.extra["got"] == ["2 + 5?", [{"role": "user", "content": "2 + 5?"}], 3, "length", 9, [4, 5, 6],
                                  {"num_turns": 2}]  # fmt: skip


def test_names_it_has_not_are_not_given_and_arguments_come_first(file: Path):
    row = REQUEST.to_row()
    assert load(f"{file}:asks_one", {}).run(row) == {"score": 3, "others": []}
    assert load(f"{file}:own_prompt", {"prompt": "mine"}).run(row)["prompt"] == "mine"
    assert load(f"{file}:own_prompt", {}).run(row)["prompt"] == "2 + 5?"


def test_a_class_is_constructed_once_in_each_process(file: Path):
    with RewardPool([Term("counts", f"{file}:Counts", {"start": 5})], 1, 5.0) as pool:
        assert [score.value for score in pool.score_all([REQUEST] * 3)] == [6, 7, 8]
    with pytest.raises(UserError, match=r"^reward.function: .*Counts failed: ValueError: start is negative$"):
        RewardPool([Term("counts", f"{file}:Counts", {"start": -1})], 1, 5.0)
    with pytest.raises(UserError, match=r"Counts cannot be made with the arguments {'stert': 1}"):
        RewardPool([Term("counts", f"{file}:Counts", {"stert": 1})], 1, 5.0)


def test_terms_add_up_with_their_weights(file: Path):
    reward = config(file, {"function": "half", "weight": -0.5, "name": "h"}, function="one", weight=2.0)
    with make_pool(reward) as pool:
        (score,) = pool.score_all([REQUEST])
    assert score == Score("scored", 1.75, extra={"one": 1.0, "h": 0.5, "h/seen": 1})


def test_a_single_function_keeps_its_own_names(file: Path):
    with make_pool(config(file, function="half", weight=4.0)) as pool:
        assert pool.score_all([REQUEST]) == [Score("scored", 2.0, extra={"seen": 1})]


@pytest.mark.parametrize(
    ("solution", "score"),
    [
        ("fine", Score("scored", 3.0, extra={"one": 1.0, "k": 2.0})),
        ("mask", Score("masked", extra={"one": 1.0})),
        ("none", Score("invalid", reason="k: returned None", extra={"one": 1.0})),
        ("exit", Score("invalid", reason="k: the reward process exited with code 3")),
        ("sleep", Score("invalid", reason="k: timed out after 1 s")),
    ],
)
def test_the_first_term_without_a_score_decides(file: Path, solution: str, score: Score):
    with make_pool(config(file, {"function": "by_kind", "name": "k"}, function="one", timeout_s=1.0)) as pool:
        assert pool.score_all([RewardRequest("s", solution), RewardRequest("s", "fine")])[0] == score


def test_the_limit_is_that_of_each_call_and_not_of_their_sum(file: Path):
    terms = [{"function": "by_kind", "name": name} for name in "abc"]
    with make_pool(config(file, *terms, timeout_s=1.0)) as pool:
        assert pool.score_all([RewardRequest("s", "slow")])[0].value == 6.0


def test_a_sum_that_is_not_finite_is_invalid(file: Path):
    terms = [{"function": "by_kind", "name": name, "weight": 1e300} for name in "ab"]
    with make_pool(config(file, *terms)) as pool:
        assert pool.score_all([RewardRequest("s", "huge")])[0].reason.startswith("the sum of its rewards is not finite")


def test_the_owner_and_the_log_are_passed_on(file: Path, tmp_path: Path):
    wakeup, log = threading.Event(), tmp_path / "reward.log"
    with make_pool(config(file, function="one"), wakeup=wakeup, log_file=log, num_workers=2) as pool:
        assert pool.score_all([REQUEST])[0].value == 1.0
        assert wakeup.is_set()
        assert log.exists()


@pytest.mark.parametrize(
    ("term", "message"),
    [
        ({"function": "absent"}, r"^reward\.terms\[1\]\.function: .* has no 'absent'"),
        ({"function": "half", "args": {"wieght": 1}}, r"^reward\.terms\[1\]\.function: .*'wieght'"),
        ({"function": "one"}, r"^reward\.terms\[1\]\.function: two rewards are called 'one': set name"),
    ],
)
def test_each_term_is_checked_at_the_start(file: Path, term: dict, message: str):
    with pytest.raises(UserError, match=message):
        make_pool(config(file, {"function": "half", "name": "fine"}, term, function="one"))


def test_functions_of_a_configuration(file: Path):
    assert terms_of(RewardConfig(function="none")) == ()
    assert [term.name for term in terms_of(RewardConfig())] == ["exact_integer"]
    assert short_name("my.module:score") == "score"
    assert short_name("dir/file.py:score") == "score"
    assert short_name("trl:module:score") == "score"
    assert short_name("http://127.0.0.1:8000/v1/judge?a=b") == "judge"
    assert short_name("http://127.0.0.1:8000") == "127.0.0.1:8000"


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5), st.booleans()), min_size=1, max_size=5))
def test_the_sum_is_that_of_the_terms_that_apply(parts: list[tuple[float, float, bool]]):
    terms = [Term(str(index), "f", weight=weight) for index, (weight, _, _) in enumerate(parts)]
    score = combine(terms, [Score("scored", value) if applies else None for _, value, applies in parts])
    applying = [weight * value for weight, value, applies in parts if applies]
    if not applying:
        assert score.status == "masked"
    else:
        assert score.value == pytest.approx(sum(applying))


def test_a_function_that_needs_more_memory_than_allowed_is_refused_with_the_remedy(tmp_path: Path):
    path = tmp_path / "large.py"
    path.write_text("data = bytearray(600 << 20)\ndef f(a, b, c, d): return 1.0\n")
    with pytest.raises(UserError, match=r"MemoryError.*reward.memory_mb allows 512 MiB of address space"):
        make_pool(RewardConfig(function=f"{path}:f", memory_mb=512))
    with make_pool(RewardConfig(function=f"{path}:f", memory_mb=2048)) as pool:
        assert pool.score_all([REQUEST])[0].value == 1.0
