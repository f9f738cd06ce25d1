"""Predicted lengths: of the same prompt, else of the run, and never more than the cap."""

from __future__ import annotations

from tranship.trainer.forecast import LengthForecast


def test_nothing_is_known_at_first() -> None:
    assert LengthForecast(256).expect("a") == 256


def test_a_prompt_goes_by_its_own_responses_and_others_by_those_of_the_run() -> None:
    forecast = LengthForecast(256)
    forecast.observe("a", [10, 30])
    assert forecast.expect("a") == 20
    assert forecast.expect("b") == 20
    forecast.observe("b", [120])
    assert forecast.expect("a") == 20
    assert forecast.expect("b") == 120
    assert forecast.expect("c") == 50, "20 + 0.3 * (120 - 20)"


def test_a_prediction_follows_the_policy_and_stays_in_its_bounds() -> None:
    forecast = LengthForecast(64)
    forecast.observe("a", [0, 0])
    assert forecast.expect("a") == 1
    for _ in range(40):
        forecast.observe("a", [200])
    assert forecast.expect("a") == 64
    forecast.observe("a", [])
    assert forecast.expect("a") == 64
