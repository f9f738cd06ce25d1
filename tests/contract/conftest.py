"""Engines of the rollout table, each on two tiny models of one shape."""

import importlib.util

import pytest
import torch

from tests.contract.rollout_lab import save_model, update
from tranship.lookup import resolve
from tranship.rollout import ROLLOUT_ENGINES


@pytest.fixture(scope="session")
def rollout_folders(tmp_path_factory):
    return [save_model(tmp_path_factory.mktemp("model"), seed) for seed in range(2)]


# What an engine's tests need beside the settings that all engines have.
OWN_SETTINGS = {"vllm": {"compiled": False}}


def engine_or_skip(name):
    """The engine class called `name`; skips the test where the library behind it is not installed."""
    if name == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: docs/rollout.md says how to test with it")
    return resolve(name, ROLLOUT_ENGINES, "rollout.engine")


@pytest.fixture(params=sorted(ROLLOUT_ENGINES))
def make_rollout(request, rollout_folders):
    """Makes an engine of the table with the first folder's weights as `version` (-1: without)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    cls, own = engine_or_skip(request.param), OWN_SETTINGS.get(request.param, {})

    def build(version=0, **settings):
        defaults = {
            "dtype": "fp32",
            "device": "cpu",
            "max_running": 4,
            "max_tokens": 120,
            "on_update": "recompute",
            "deterministic": False,
            "eos_token_ids": (1,),
        }
        engine = cls(rollout_folders[0], **(defaults | own | settings))
        if version >= 0:
            update(engine, rollout_folders[0], version)
        return engine

    yield build
    torch.set_num_threads(before)
