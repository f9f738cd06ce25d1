"""A model that scores responses: beside the trainer, in a process of its own, added to functions, and as a critic."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flow_helpers import read_jsonl
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from tranship.config.load import loads
from tranship.trainer import run
from tranship.types import UserError

Recipe = Callable[..., dict[str, Any]]


def scorer(tiny_model: Path, folder: Path, num_labels: int = 1) -> Path:
    """A random reward model over the tiny model's tokens."""
    shutil.copytree(tiny_model, folder)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    torch.manual_seed(1)
    settings = AutoConfig.from_pretrained(tiny_model, num_labels=num_labels)
    AutoModelForSequenceClassification.from_config(settings).save_pretrained(folder)
    return folder


def scores(run_dir: Path) -> list[float]:
    rows = read_jsonl(run_dir / "samples.jsonl")
    assert all(row["status"] == "scored" for row in rows)
    return [row["score"] for row in sorted(rows, key=lambda row: (row["group_id"], row["sample_index"]))]


def test_a_reward_model_alone_gives_the_rewards(recipe: Recipe, tiny_model: Path, tmp_path: Path) -> None:
    model = str(scorer(tiny_model, tmp_path / "scorer"))
    run(loads(recipe(reward={"function": "none", "model": {"path": model}}, train__steps=2)))
    found = scores(tmp_path / "run")
    assert len(set(found)) > len(found) // 2
    assert not (tmp_path / "run" / "reward.log").exists()


def test_functions_and_model_add_up_by_their_weights(recipe: Recipe, tiny_model: Path, tmp_path: Path) -> None:
    model = str(scorer(tiny_model, tmp_path / "scorer"))
    function = recipe()["reward"]["function"]
    common: dict[str, Any] = {"train__steps": 1}
    parts = {
        "model": {"function": "none", "model": {"path": model}},
        "function": {"function": function},
        "both": {"function": function, "weight": 2.0, "model": {"path": model, "weight": -3.0}},
    }
    for name, reward in parts.items():
        run(loads(recipe(run__dir=str(tmp_path / name), reward=reward, **common)))
    expected = 2.0 * np.array(scores(tmp_path / "function")) - 3.0 * np.array(scores(tmp_path / "model"))
    assert scores(tmp_path / "both") == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_a_process_of_its_own_changes_nothing(recipe: Recipe, tiny_model: Path, tmp_path: Path) -> None:
    model = str(scorer(tiny_model, tmp_path / "scorer"))
    for placement in ("shared", "own"):
        reward = {"function": "none", "model": {"path": model, "placement": placement}}
        ray = {"placement__runtime": "ray", "placement__layout": "fused"} if placement == "own" else {}
        run(loads(recipe(run__dir=str(tmp_path / placement), run__export=True, reward=reward, train__steps=2, **ray)))
    assert scores(tmp_path / "own") == pytest.approx(scores(tmp_path / "shared"), abs=1e-6)


def test_a_critic_may_begin_as_a_reward_model(recipe: Recipe, tiny_model: Path, tmp_path: Path) -> None:
    model = str(scorer(tiny_model, tmp_path / "scorer"))
    for name, path in (("zeros", None), ("taken", model)):
        algorithm = {"name": "ppo", "critic": {"path": path}}
        run(loads(recipe(run__dir=str(tmp_path / name), run__export=True, algorithm=algorithm, train__steps=1)))
    a, b = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("zeros", "taken"))
    assert any((a[key] != b[key]).any() for key in a), "other values, other advantages"


def test_a_model_of_two_labels_is_refused(recipe: Recipe, tiny_model: Path, tmp_path: Path) -> None:
    model = str(scorer(tiny_model, tmp_path / "scorer", num_labels=2))
    with pytest.raises(UserError, match="2 labels"):
        run(loads(recipe(reward={"function": "none", "model": {"path": model}})))


def test_a_model_of_other_tokens_is_refused(recipe: Recipe, tiny_model: Path, tmp_path: Path) -> None:
    folder = scorer(tiny_model, tmp_path / "scorer")
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace('"a":', '"ä":', 1) if '"a":' in text else text[:-2])
    with pytest.raises(UserError, match="token"):
        run(loads(recipe(reward={"function": "none", "model": {"path": str(folder)}})))
