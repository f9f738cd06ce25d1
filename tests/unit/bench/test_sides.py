"""A side that did not do the workload is never timed: each kind of cheating or failing is caught."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tranship.bench.sides import SIDES, SIDES_OF, Round, check_content, check_same_prompts
from tranship.bench.workloads import QUICK
from tranship.types import RunError

W = QUICK["W"]
L = QUICK["L"]


def good(workload: Any) -> dict[str, Any]:
    lengths = workload.lengths()
    steps = []
    for index in range(workload.steps):
        groups = lengths[index * workload.num_prompts : (index + 1) * workload.num_prompts] if lengths else None
        tokens = sum(map(sum, groups)) if groups else 20
        steps.append({"samples": workload.num_samples, "tokens": tokens, "longest": 5, "loss": 0.1, "seconds": 2.0})
    return {"steps": steps, "weights_changed": True}


def test_what_is_right_passes() -> None:
    check_content("ours", W, good(W))
    check_content("ours", L, good(L))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"samples": 7}, "7 samples"),
        ({"invalid": 1}, "1 of them invalid"),
        ({"longest": 25}, "25 tokens; the cap is 24"),
        ({"longest": 0}, "0 tokens"),
        ({"loss": float("nan")}, "the loss is nan"),
    ],
)
def test_a_wrong_step_is_named(change: dict[str, Any], said: str) -> None:
    report = copy.deepcopy(good(W))
    report["steps"][1] |= change
    with pytest.raises(RunError, match=f"ours on W, step 2: .*{said}"):
        check_content("ours", W, report)


def test_frozen_weights_and_missing_steps_are_caught() -> None:
    with pytest.raises(RunError, match="the weights did not change"):
        check_content("trl", W, good(W) | {"weights_changed": False})
    with pytest.raises(RunError, match="1 steps instead of 2"):
        check_content("trl", W, good(W) | {"steps": good(W)["steps"][:1]})


def test_drawn_lengths_are_made_to_the_token() -> None:
    report = copy.deepcopy(good(L))
    report["steps"][0]["tokens"] -= 1
    with pytest.raises(RunError, match="instead of the drawn"):
        check_content("plain_loop", L, report)


def round_of(prompt_tokens: int) -> Round:
    step = {"prompt_tokens": prompt_tokens, "tokens": 30, "seconds": 2.0, "stages": {"gen": 0.5}}
    return Round([step, step], first_step_s=1.0, peak_bytes=1, versions={})


def test_different_prompts_are_caught() -> None:
    check_same_prompts(W, {"ours": [round_of(10)], "trl": [round_of(10)]})
    with pytest.raises(RunError, match="different prompts"):
        check_same_prompts(W, {"ours": [round_of(10)], "trl": [round_of(11)]})


def test_a_rounds_speed_is_over_wall_time() -> None:
    measured = round_of(1)
    assert measured.tokens_per_s == 15.0
    assert measured.stage_seconds("gen") == 0.5
    assert measured.stage_seconds("reward") == 0.0


def test_every_workload_has_a_side_of_ours_and_known_ones() -> None:
    assert all("ours" in sides and set(sides) <= set(SIDES) for sides in SIDES_OF.values())
