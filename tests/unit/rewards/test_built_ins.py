"""Verifiers that are more than a comparison of numbers: algebra, form, and reasoning-gym's own."""

import time
from typing import Any

import pytest

from tranship.rewards import RewardPool, RewardRequest, Term
from tranship.rewards.calls import load
from tranship.types import UserError

HALF = r"\frac{1}{2}"
ENTRY = {"question": "4 - 1 - 7 =", "answer": "-4", "metadata": {"source_dataset": "chain_sum"}}


def run(name: str, text: str, truth: Any = None, info: dict | None = None, **args: Any) -> dict:
    return load(name, args).run(RewardRequest("s", text, truth, info).to_row())


@pytest.mark.parametrize(
    ("truth", "text", "score", "well_formed"),
    [
        (HALF, r"\boxed{0.5}", 1, 1),
        (HALF, r"It is $\frac{2}{4}$.", 1, 1),
        (HALF, r"\boxed{x}", 0, 1),
        (HALF, "none", 0, 0),
        (HALF, "", 0, 0),
        ("42", "I think 42", 1, 1),
        ("42", r"first \boxed{41}, then \boxed{42}", 1, 1),
        (42, r"\boxed{42.0}", 1, 1),
        ("x^2-1", r"$(x-1)(x+1)$", 1, 1),
        ("$\\{1,2\\}$", r"\boxed{\{2,1\}}", 1, 1),
        ("1,234", r"\boxed{1234}", 1, 1),
    ],
)
def test_math_verify(truth: Any, text: str, score: int, well_formed: int):
    result = run("math_verify", text, truth)
    assert (result.pop("answer") is not None) == bool(well_formed)
    assert result == {"score": score, "well_formed": well_formed}


def test_math_verify_refuses_a_truth_that_it_cannot_read():
    with pytest.raises(ValueError, match="is no expression"):
        run("math_verify", "1", "")


def test_an_expression_without_end_costs_its_sample_alone():
    with RewardPool([Term("math_verify", "math_verify")], 1, 1.0) as pool:
        started = time.monotonic()
        slow, right = pool.score_all(
            [RewardRequest("s", r"\boxed{9^{9^{9^{9}}}!}", "7"), RewardRequest("s", r"\boxed{7}", "7")]
        )
        assert time.monotonic() - started < 15
    assert slow.reason == "timed out after 1 s" or slow.value == 0
    assert right.value == 1


GOOD = "<think>a</think> <answer>7</answer>"


@pytest.mark.parametrize(
    ("text", "args", "score"),
    [
        (GOOD, {}, 1),
        (f"\n {GOOD}\n", {}, 1),
        ("<answer>7</answer>", {}, 0),
        ("<answer>7</answer>", {"tags": ["answer"]}, 1),
        (GOOD + " and more", {}, 0),
        ("<think>a</think> so <answer>7</answer>", {}, 0),
        ("<answer>7</answer><think>a</think>", {}, 0),
        ("<think>a</think><think>b</think><answer>7</answer>", {}, 0),
        ("<think>a<answer>7</answer></think>", {}, 0),
        ("a</think> <answer>7</answer>", {}, 0),
        ("a</think> <answer>7</answer>", {"prefilled": True}, 1),
        (GOOD, {"prefilled": True}, 0),
        ("", {}, 0),
        ("<think>a</think> 7", {"partial": True}, 0.25),
        (GOOD, {"partial": True}, 1),
        ("yes\nno", {"pattern": "yes.no"}, 1),
        ("yes no!", {"pattern": "yes.no"}, 0),
    ],
)
def test_format_tags(text: str, args: dict, score: float):
    assert run("format_tags", text, **args)["score"] == score


def test_a_pattern_that_backtracks_costs_its_sample_alone():
    term = Term("format_tags", "format_tags", {"pattern": r"(a+)+"})
    with RewardPool([term], 1, 1.0) as pool:
        slow, right = pool.score_all([RewardRequest("s", "a" * 60 + "b"), RewardRequest("s", "aaa")])
    assert (slow.reason, right.value) == ("timed out after 1 s", 1.0)


@pytest.mark.parametrize(
    ("args", "message"),
    [({"pattern": "("}, "is no regular expression"), ({"tags": []}, "at least one"), ({"tags": ["a", "a"]}, "once")],
)
def test_format_arguments_are_checked_at_the_start(args: dict, message: str):
    with pytest.raises(UserError, match=message):
        load("format_tags", args)


@pytest.mark.parametrize(
    ("text", "args", "score", "well_formed"),
    [
        ("<answer>-4</answer>", {}, 1, 1),
        ("<answer>9</answer> no: <answer> -4 </answer>", {}, 1, 1),
        ("<answer>5</answer>", {}, 0, 1),
        ("-4", {}, 0, 0),
        ("-4", {"tag": None}, 1, 1),
        ("<final>-4</final>", {"tag": "final"}, 1, 1),
    ],
)
def test_reasoning_gym(text: str, args: dict, score: float, well_formed: float):
    result = run("reasoning_gym", text, "-4", {"entry": ENTRY}, **args)
    assert result["well_formed"] == well_formed
    assert result["score"] == pytest.approx(score, abs=0.02)


def test_reasoning_gym_needs_the_entry_and_its_dataset():
    with pytest.raises(ValueError, match="no reasoning-gym entry"):
        run("reasoning_gym", "1", "1", {})
    with pytest.raises(ValueError, match="names a reasoning-gym dataset"):
        run("reasoning_gym", "1", "1", {"entry": {"answer": "1"}})
    with pytest.raises(ValueError, match="nope"):
        run("reasoning_gym", "1", "1", {"entry": ENTRY, "dataset": "nope"})
