"""Whole runs in which a world answers the model: several turns, tool calls, sessions that fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flow_helpers import read_jsonl
from safetensors.torch import load_file

import tranship
from tranship.config.load import loads

Recipe = Callable[..., dict[str, Any]]
DRILL = f"{Path(__file__).parent / 'envs_for_tests.py'}:Drill"
ROWS = {"source": "tranship.envs.calculator:rows", "args": {"count": 16, "low": 1, "high": 99}}


def env_recipe(recipe: Recipe, **changes: Any) -> dict[str, Any]:
    return recipe(
        **{
            "data__train": ROWS,
            "data__val": {**ROWS, "args": {**ROWS["args"], "count": 2, "seed": 1}},
            "data__max_prompt_tokens": 512,
            "env": {"name": DRILL, "max_turn_tokens": 6},
            "reward": {"function": "none"},
            "rollout__max_response_tokens": 96,
            "train__steps": 2,
            **changes,
        }
    )


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    name = (run_dir / "checkpoints" / "latest").read_text()
    return load_file(run_dir / "checkpoints" / name / "model" / "model.safetensors")


def test_a_run_with_tools_trains_what_the_model_wrote(recipe: Recipe) -> None:
    result = tranship.run(loads(env_recipe(recipe, validation__after_training=True)))
    assert result.status == "completed"
    ledger = result.summary["ledger"]
    assert (ledger["admitted"], ledger["in_flight"]) == (4, 0)
    assert ledger["trained"] + sum(ledger["dropped"].values()) == 4
    rows = read_jsonl(result.run_dir / "samples.jsonl")
    assert len(rows) == 2 * 8
    for row in rows:
        info = row["rollout_info"]
        assert (info["turns"], info["tool_calls"], info["tool_errors"]) == (3, 2, 0)
        assert "invalid" not in info
        assert info["env_reward"] == row["score"]
        assert row["output"].count("tool\n") >= 2
        assert '"name": "calculate"' in row["input"], "the model is told of the tools"
    assert len({row["score"] for row in rows}) > 4
    steps = [row for row in read_jsonl(result.run_dir / "metrics.jsonl") if row["kind"] == "step"]
    for step in steps:
        assert step["actor/num_tokens"] == 8 * 3 * 6, "the model's own tokens alone are trained"
        assert step["mismatch/logprob_gap_max"] < 1e-4, "what was sampled is what is trained"
    assert read_jsonl(result.run_dir / "val_samples.jsonl")


def test_it_repeats_bit_for_bit(recipe: Recipe, tmp_path: Path) -> None:
    runs = [
        tranship.run(loads(env_recipe(recipe, run__dir=str(tmp_path / name), env={**env, "name": DRILL})))
        for name, env in (("one", {"num_workers": 1}), ("two", {"num_workers": 4}))
    ]
    one, two = (weights(run.run_dir) for run in runs)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    outputs = [
        sorted(
            (row["group_id"], row["sample_index"], row["output"]) for row in read_jsonl(run.run_dir / "samples.jsonl")
        )
        for run in runs
    ]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("fail_at", [0, 2])
def test_a_session_that_fails_is_recorded_not_scored(recipe: Recipe, fail_at: int) -> None:
    env = {"name": DRILL, "args": {"fail_index": 0, "fail_at": fail_at}, "max_turn_tokens": 6}
    config = env_recipe(recipe, env=env, data__shuffle=False, algorithm={"kl": {"coef": 0.1}})
    result = tranship.run(loads(config))
    rows = [row for row in read_jsonl(result.run_dir / "samples.jsonl") if row["rollout_info"].get("invalid")]
    assert len(rows) == 4
    for row in rows:
        assert row["rollout_info"]["invalid"] == "RuntimeError: no such task"
        assert row["rollout_info"]["turns"] == fail_at
        assert (row["status"], row["score"]) == ("invalid", None)
    ledger = result.summary["ledger"]
    assert (ledger["in_flight"], sum(ledger["dropped"].values())) == (0, 1)
