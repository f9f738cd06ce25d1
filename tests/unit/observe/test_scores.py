"""mean@n, pass@k, best@k, maj@n and their intervals, against enumeration, known values and simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tranship.observe.scores import (
    PromptScores,
    best_at,
    by_source,
    estimate,
    majority,
    pass_at,
    sample_counts,
    statistics,
    why_no_majority,
)


def prompt(scores: list[float], answers: list[str | None] | None = None, source: str = "sums") -> PromptScores:
    return PromptScores(source, scores, [score >= 1 for score in scores], answers or [None] * len(scores))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=7), st.data())
def test_best_and_pass_are_the_means_over_all_subsets(scores: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(scores)))
    subsets = list(itertools.combinations(scores, k))
    assert best_at(scores, k) == pytest.approx(np.mean([max(subset) for subset in subsets]))
    right = [score == 1 for score in scores]
    share = np.mean([any(subset) for subset in itertools.combinations(right, k)])
    assert pass_at(len(scores), sum(right), k) == pytest.approx(share)


def test_pass_of_many_samples_neither_overflows_nor_rounds_to_nothing() -> None:
    assert pass_at(10_000, 1, 5_000) == pytest.approx(0.5)
    assert pass_at(2_000, 1, 1) == pytest.approx(1 / 2_000)
    assert pass_at(4, 3, 2) == 1.0


def test_the_counts_are_powers_of_two_and_all() -> None:
    assert sample_counts(1) == [1]
    assert sample_counts(2) == [1, 2]
    assert sample_counts(6) == [1, 2, 4, 6]
    assert sample_counts(8) == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("answers", "correct", "wanted"),
    [
        (["7", "7", "8"], [True, True, False], 1.0),
        (["7", "8", "8"], [True, False, False], 0.0),
        (["7", "8"], [True, False], 0.5),
        (["7", "8", "9"], [False, True, False], 1 / 3),
        (["7", None, None], [True, False, False], 1.0),
        ([None, None], [False, False], 0.0),
        (["7", "7", "8"], [True, False, False], 0.5),
    ],
)
def test_majority(answers: list[str | None], correct: list[bool], wanted: float) -> None:
    assert majority(answers, correct) == pytest.approx(wanted)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["7", "8", None]), st.booleans()), min_size=1, max_size=8), st.randoms())
def test_a_majority_does_not_depend_on_the_order(samples: list[tuple[str | None, bool]], random: object) -> None:
    shuffled = samples[:]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert majority(*zip(*samples, strict=True)) == pytest.approx(majority(*zip(*shuffled, strict=True)))


def test_statistics_of_four_samples() -> None:
    found = statistics(
        [prompt([1, 1, 0, 0], ["7", "7", "7", "3"]), prompt([0, 0, 0, 0], ["1", "2", "2", "2"])], num_samples=4
    )
    assert list(found) == ["mean@4", "pass@1", "pass@2", "best@2", "pass@4", "best@4", "maj@4"]
    assert found["mean@4"].value == found["pass@1"].value == 0.25
    assert found["pass@2"].value == pytest.approx((1 - 1 / 6) / 2)
    assert found["best@2"].value == pytest.approx((1 - 1 / 6) / 2)
    assert found["pass@4"].value == 0.5
    # "7" has three votes, two of them for responses that count as right.
    assert found["maj@4"].value == pytest.approx((2 / 3) / 2)
    assert all(e.num_prompts == 2 for e in found.values())


def test_left_out_samples_enter_no_mean_and_a_prompt_without_enough_is_not_counted() -> None:
    found = statistics([prompt([1, 0]), prompt([1]), prompt([])], num_samples=2)
    assert found["mean@2"].value == 0.75
    assert found["mean@2"].num_prompts == 2
    assert found["pass@1"].num_prompts == 2
    assert (found["pass@2"].value, found["pass@2"].num_prompts) == (1.0, 1)
    assert statistics([prompt([])], num_samples=2) == {}


def test_sources_are_kept_apart_and_only_those_with_answers_vote() -> None:
    prompts = [prompt([1, 1], ["7", "7"], "b"), prompt([0, 0], source="a")]
    apart = by_source(prompts, 2)
    assert list(apart) == ["a", "b"]
    assert apart["a"]["mean@2"].value == 0.0
    assert apart["b"]["mean@2"].value == 1.0
    assert "maj@2" not in apart["a"]
    assert statistics(prompts, 2)["maj@2"].value == 1.0
    assert why_no_majority(prompts) == ""
    assert "answer" in why_no_majority(prompts[1:])


def test_wilson_of_known_values() -> None:
    # Newcombe 1998, table I: 81 of 263 gives 0.2553 to 0.3662; 0 of 20 gives 0 to 0.1611.
    some = estimate([1.0] * 81 + [0.0] * 182, unit=True)
    none = estimate([0.0] * 20, unit=True)
    assert some is not None
    assert none is not None
    assert (some.low, some.high) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert (none.low, none.high) == pytest.approx((0.0, 0.1611), abs=5e-5)


@pytest.mark.parametrize(("num", "quantile"), [(2, 12.706), (3, 4.303), (6, 2.571), (11, 2.228), (31, 2.042)])
def test_few_prompts_have_students_interval(num: int, quantile: float) -> None:
    values = np.linspace(3.0, 9.0, num)
    found = estimate(list(values), unit=False)
    assert found is not None
    assert found.low is not None
    assert found.value - found.low == pytest.approx(quantile * values.std(ddof=1) / math.sqrt(num), rel=0.01)


def test_one_prompt_with_a_score_of_no_known_range_has_no_interval() -> None:
    found = estimate([0.3], unit=False)
    assert found is not None
    assert (found.value, found.low, found.high) == (0.3, None, None)
    assert estimate([], unit=True) is None


@pytest.mark.parametrize("samples", [1, 4])
def test_intervals_hold_the_truth_19_times_of_20(samples: int) -> None:
    """Prompts differ in how hard they are: an interval that counted samples instead of prompts would be too short."""
    random = np.random.default_rng(0)
    inside = 0
    for _ in range(400):
        chances = random.beta(0.5, 0.5, size=50)
        rights = random.random((50, samples)) < chances[:, None]
        found = statistics([prompt([float(right) for right in row]) for row in rights], samples)[f"mean@{samples}"]
        assert found.low is not None
        assert found.high is not None
        inside += found.low <= 0.5 <= found.high
    assert 0.92 <= inside / 400 <= 0.98
