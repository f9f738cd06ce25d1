"""Length: DAPO's overlong penalty, the penalty of every token, and the cosine for right and wrong answers."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tranship.rewards import overlong_penalty
from tranship.rewards.calls import load
from tranship.rewards.request import RewardRequest
from tranship.types import UserError


def score(name: str, request: RewardRequest, **args: Any) -> Any:
    return load(name, args).run(request.to_row())


@pytest.mark.parametrize(
    ("length", "penalty"), [(0, 0), (79, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (101, -1)]
)
def test_overlong_grows_over_the_cache_and_no_further(length: int, penalty: float):
    assert overlong_penalty(length, 100, 20, 1.0) == pytest.approx(penalty, abs=1e-12)
    assert overlong_penalty(length, 100, 20, 0.5) == pytest.approx(penalty / 2, abs=1e-12)
    assert overlong_penalty(length, 100, 0, 1.0) == 0


@given(st.integers(0, 300), st.integers(0, 300), st.integers(1, 100), st.floats(0.1, 10))
def test_overlong_never_rewards_a_longer_response(shorter: int, longer: int, cache: int, factor: float):
    shorter, longer = sorted((shorter, longer))
    low, high = overlong_penalty(longer, 100, cache, factor), overlong_penalty(shorter, 100, cache, factor)
    assert -factor <= low <= high <= 0


@pytest.mark.parametrize(
    ("shape", "tokens", "value"),
    [
        ("linear", 0, 0),
        ("linear", 25, -0.25),
        ("linear", 100, -1),
        ("linear", 300, -1),
        ("cosine", 0, 0),
        ("cosine", 25, -0.1464466),
        ("cosine", 50, -0.5),
        ("cosine", 100, -1),
    ],
)
def test_length_penalty(shape: str, tokens: int, value: float):
    request = RewardRequest("s", "", num_tokens=tokens, max_response_tokens=100)
    assert score("length_penalty", request, shape=shape) == pytest.approx(value)


def test_length_penalty_between_its_ends():
    request = RewardRequest("s", "", num_tokens=60, max_response_tokens=1000)
    assert score("length_penalty", request, start=50, end=70) == pytest.approx(-0.5)
    assert score("length_penalty", request, start=60) == 0


@pytest.mark.parametrize(
    ("text", "tokens", "reason", "value"),
    [
        ("7", 0, "stop", 2.0),
        ("7", 100, "stop", 1.5),
        ("7", 200, "stop", 1.0),
        ("8", 0, "stop", -10.0),
        ("8", 100, "stop", -5.0),
        ("8", 200, "stop", 0.0),
        ("7", 200, "length", -10.0),
    ],
)
def test_cosine_length(text: str, tokens: int, reason: str, value: float):
    request = RewardRequest("s", text, "7", num_tokens=tokens, max_response_tokens=200, finish_reason=reason)
    result = score("cosine_length", request)
    assert result["score"] == pytest.approx(value)
    assert result["of"] == float(text == "7")
    assert result["well_formed"] == 1


def test_cosine_length_makes_no_score_of_what_has_none():
    with pytest.raises(ValueError, match="'seven' is not a number"):
        score("cosine_length", RewardRequest("s", "7", "seven", max_response_tokens=9))


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("length_penalty", {"shape": "square"}, "shape 'square' is not known: use linear or cosine"),
        ("length_penalty", {"start": 5, "end": 5}, "start 5 and end 5"),
        ("length_penalty", {"begin": 5}, "'begin'"),
        ("cosine_length", {"of": "nothing"}, "reward.function: cosine_length: of: 'nothing' is not known"),
        ("cosine_length", {"right": [1]}, "right \\[1\\] is not a pair"),
    ],
)
def test_wrong_arguments_are_refused_at_the_start(name: str, args: dict, message: str):
    with pytest.raises(UserError, match=message):
        load(name, args)
