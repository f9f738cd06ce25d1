"""The reward stage: what functions, a reward model, the environment and the length give becomes one score."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tranship.config import AlgorithmConfig, OverlongConfig, RewardConfig, RewardModelConfig
from tranship.rewards import make_pool
from tranship.stages import Stopwatch
from tranship.stages.reward import Facts, RewardStage, final_score
from tranship.types import SampleId, Score, UserError

FUNCTIONS = """
def length(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str), "text": solution_str}

def sees(data_source, solution_str, ground_truth, extra_info, prompt, messages, num_tokens, finish_reason,
         max_response_tokens, completion_ids, rollout_info):
    return {"score": 1, "got": [data_source, ground_truth, extra_info, prompt, messages, num_tokens, finish_reason,
                                max_response_tokens, completion_ids, rollout_info]}

def fails(data_source, solution_str, ground_truth, extra_info=None):
    raise LookupError("called")
"""

MODEL = RewardModelConfig(path="model", weight=2.0)
SHORT = Facts(3, "stop")


def scored(value: float, raw: float | None = None, **extra: Any) -> Score:
    return Score("scored", value, extra=extra, raw=value if raw is None else raw)


@pytest.mark.parametrize(
    ("functions", "facts", "reward", "expected"),
    [
        (Score("scored", 1.0, extra={"a": 2}), SHORT, {}, scored(1.0, a=2)),
        (
            Score("scored", 1.0),
            Facts(3, "stop", model_score=0.5, env_reward=-4.0),
            {"model": MODEL},
            scored(-2.0, reward_model=0.5, env_reward=-4.0),
        ),
        (None, Facts(3, "stop", env_reward=1.5), {}, scored(1.5, env_reward=1.5)),
        (None, Facts(3, "stop", model_score=1.5), {"model": MODEL}, scored(3.0, reward_model=1.5)),
        (Score("scored", 1.0), Facts(90, "stop"), {"overlong": (20, 1.0)}, scored(0.5, 1.0, overlong=-0.5)),
        (Score("scored", 0.0), Facts(100, "length"), {"overlong": (20, 1.0)}, scored(-1.0, 0.0, overlong=-1.0)),
        (Score("scored", 0.0), Facts(80, "stop"), {"overlong": (20, 1.0)}, scored(0.0, overlong=0.0)),
        (Score("scored", 1.0), Facts(100, "length"), {"mask_truncated": True}, Score("masked", raw=1.0)),
        (Score("scored", 1.0), Facts(100, "stop"), {"mask_truncated": True}, scored(1.0)),
        (Score("invalid", reason="bad"), Facts(9, "length"), {"mask_truncated": True}, Score("invalid", reason="bad")),
        (Score("masked"), Facts(3, "stop", env_reward=1.0), {}, Score("masked")),
        (None, Facts(3, "stop", env_reward=1.0, invalid="env: died"), {}, Score("invalid", reason="env: died")),
    ],
)
def test_one_score(functions: Score | None, facts: Facts, reward: dict, expected: Score) -> None:
    if "overlong" in reward:
        cache, factor = reward["overlong"]
        reward = {"overlong": OverlongConfig(cache_tokens=cache, factor=factor)}
    assert final_score(functions, facts, RewardConfig(**reward), 100) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_model_or_an_environment_without_a_number_makes_the_sample_invalid(value: float) -> None:
    for facts in (Facts(3, "stop", model_score=value), Facts(3, "stop", env_reward=value)):
        score = final_score(Score("scored", 1.0), facts, RewardConfig(model=MODEL), 100)
        assert score.status == "invalid"
        assert "not finite" in score.reason


def test_nothing_is_no_zero() -> None:
    score = final_score(None, SHORT, RewardConfig(function="none"), 100)
    assert (score.status, score.value) == ("invalid", None)
    assert score.reason.startswith("nothing gave a reward")


class Bench:
    """A reward stage with a dock around it."""

    def __init__(self, rig: Any, reward: RewardConfig) -> None:
        self.rig = rig
        self.wakeup = threading.Event()
        self.pool = make_pool(reward, wakeup=self.wakeup) if reward.function != "none" else None
        self.stage = RewardStage(
            rig.client,
            self.pool,
            reward=reward,
            max_response_tokens=100,
            kinds=("val", "train"),
            decode=lambda ids: "".join(chr(97 + token) for token in ids),
            lease_s=60.0,
            watch=Stopwatch(),
        )

    def generated(
        self,
        group_id: int,
        lengths: Sequence[int],
        infos: Sequence[dict] | None = None,
        reasons: Sequence[str] | None = None,
        model_scores: Sequence[float] | None = None,
        **info: Any,
    ) -> None:
        self.rig.admit(group_id, len(lengths), extra_info={}, messages=[], **info)
        # As a sampler does: the dock lets only groups that were started be written to.
        self.rig.client.take("rollout", max_groups=1, version=self.rig.dock.version)
        columns = {
            "response": [np.arange(length, dtype=np.int32) for length in lengths],
            "response_mask": [np.ones(length, dtype=bool) for length in lengths],
            "logprobs": [np.zeros(length, dtype=np.float32) for length in lengths],
            "policy_versions": [np.zeros(length, dtype=np.int32) for length in lengths],
            "finish_reason": list(reasons or ["stop"] * len(lengths)),
            "rollout_info": list(infos or [{}] * len(lengths)),
        }
        if model_scores is not None:
            columns["model_score"] = list(model_scores)
        rows = [SampleId(group_id, index) for index in range(len(lengths))]
        self.rig.client.put(rows, columns, sampled_version=self.rig.dock.version)

    def rewards(self, num_groups: int = 1) -> dict[int, list[dict]]:
        found: dict[int, list[dict]] = {}
        deadline = time.monotonic() + 20
        while len(found) < num_groups:
            assert time.monotonic() < deadline, f"only {sorted(found)} came"
            self.stage.step()
            while (batch := self.rig.client.take("advantage", max_groups=1)) is not None:
                found[batch.groups[0].group_id] = [dict(reward) for reward in batch["reward"]]
            self.wakeup.wait(0.02)
            self.wakeup.clear()
        return found


@pytest.fixture
def bench(rig: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    made: list[Bench] = []

    def make(function: str, **reward: Any) -> Bench:
        name = function if function == "none" else f"{path}:{function}"
        settings = RewardConfig(function=name, **reward)
        made.append(Bench(rig(AlgorithmConfig(), settings.model), settings))
        return made[-1]

    yield make
    for one in made:
        one.stage.close()


def test_groups_are_put_whole_with_value_and_raw(bench: Callable[..., Bench]) -> None:
    one = bench("length", overlong=OverlongConfig(cache_tokens=20))
    one.generated(0, [3, 90])
    one.generated(1, [5, 6])
    found = one.rewards(2)
    short, long = found[0]
    assert short["extra"] == {"text": "abc", "overlong": 0.0}
    assert (short["status"], short["value"], short["raw"], short["reason"]) == ("scored", 3.0, 3.0, "")
    assert (long["value"], long["raw"], long["extra"]["overlong"]) == (89.5, 90.0, -0.5)
    assert [reward["value"] for reward in found[1]] == [5.0, 6.0]


def test_what_a_function_may_know(bench: Callable[..., Bench]) -> None:
    one = bench("sees")
    one.generated(0, [2], [{"num_turns": 3}], ["length"])
    assert one.rewards()[0][0]["extra"]["got"] == [
        "here", 1, {}, "?", [], 2, "length", 100, [0, 1], {"num_turns": 3}
    ]  # fmt: skip


def test_a_rollout_that_is_invalid_is_shown_to_no_function(bench: Callable[..., Bench]) -> None:
    one = bench("fails")
    one.generated(0, [2, 3], [{"invalid": "env: timed out", "env_reward": 1.0}, {}])
    first, second = one.rewards()[0]
    assert (first["status"], first["reason"]) == ("invalid", "env: timed out")
    assert (second["status"], second["reason"]) == ("invalid", "LookupError: called")


def test_without_a_function_no_process_is_needed(bench: Callable[..., Bench]) -> None:
    one = bench("none")
    one.generated(0, [2, 3, 4], [{"env_reward": 0.5}, {"env_reward": np.float32(2)}, {}])
    rewards = one.rewards()[0]
    assert one.pool is None
    assert [reward["value"] for reward in rewards] == [0.5, 2.0, None]
    assert [reward["status"] for reward in rewards] == ["scored", "scored", "invalid"]


def test_a_reward_model_adds_its_score(bench: Callable[..., Bench]) -> None:
    one = bench("length", model=MODEL)
    one.generated(0, [2, 3], model_scores=[0.5, -1.0])
    assert [reward["value"] for reward in one.rewards()[0]] == [3.0, 1.0]


def test_a_shaping_longer_than_the_cap_is_refused(bench: Callable[..., Bench]) -> None:
    with pytest.raises(UserError, match=r"cache_tokens 200 is more than rollout.max_response_tokens 100"):
        bench("none", overlong=OverlongConfig(cache_tokens=200))
