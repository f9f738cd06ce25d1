"""Runs of a tiny random model: real processes, real files, seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tranship.models.catalog import get


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model with a tokenizer and a chat template."""
    return get("tiny-random", cache=tmp_path_factory.mktemp("cache"), log=lambda _: None)


@pytest.fixture
def recipe(tiny_model: Path, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A small recipe as a mapping, with `a.b=value` style changes as keyword arguments (a__b=value)."""

    def make(**changes: Any) -> dict[str, Any]:
        values: dict[str, Any] = {
            "run": {"dir": str(tmp_path / "run"), "seed": 3, "deterministic": True, "export": False},
            "model": {"path": str(tiny_model)},
            "data": {
                "train": {"source": "sums", "args": {"low": 1, "high": 9, "split": "train", "num_val": 4}},
                "val": {"source": "sums", "args": {"low": 1, "high": 9, "split": "val", "num_val": 4}},
                "max_prompt_tokens": 256,
            },
            "rollout": {"group_size": 4, "max_response_tokens": 8},
            "reward": {"function": f"{Path(__file__).parent / 'rewards_for_tests.py'}:token_sum"},
            "train": {"steps": 3, "batch_size": 8, "optimizer": {"learning_rate": 1e-3}},
            "validation": {"before_training": False, "after_training": False},
            "observe": {"console": "off", "trackers": []},
        }
        for key, value in changes.items():
            *sections, name = key.split("__")
            target = values
            for section in sections:
                target = target.setdefault(section, {})
            target[name] = value
        return values

    return make
