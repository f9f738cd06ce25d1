"""Engines of the rollout table, each on two tiny models of one shape."""

import pytest
import torch

from tests.contract.rollout_lab import save_model, update
from tranship.lookup import resolve
from tranship.rollout import ROLLOUT_ENGINES


@pytest.fixture(scope="session")
def rollout_folders(tmp_path_factory):
    return [save_model(tmp_path_factory.mktemp("model"), seed) for seed in range(2)]


@pytest.fixture(params=sorted(ROLLOUT_ENGINES))
def make_rollout(request, rollout_folders):
    """Makes an engine of the table with the first folder's weights as `version` (-1: without)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    cls = resolve(request.param, ROLLOUT_ENGINES, "rollout.engine")

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
        engine = cls(rollout_folders[0], **(defaults | settings))
        if version >= 0:
            update(engine, rollout_folders[0], version)
        return engine

    yield build
    torch.set_num_threads(before)
