"""vLLM engines on tiny models. Skipped where vLLM is not installed: it is optional, and has its own environment."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from tranship.models.tiny import make_tiny
from tranship.rollout import GroupRequest
from tranship.rollout.native import NativeEngine, load_folder
from tranship.rollout.vllm import VllmEngine
from tranship.types import SampleId, Sampling, sample_seed

SETTINGS = {
    "dtype": "fp32",
    "device": "cpu",
    "max_running": 4,
    "max_tokens": 400,
    "on_update": "recompute",
    "deterministic": False,
    "eos_token_ids": (2,),
    "ignore_eos": True,
}


class VllmLab:
    """Makes model folders (kept for the session), engines, requests and what they give."""

    def __init__(self, root):
        self._root = root

    def folder(self, family="llama", tied=True, seed=0):
        path = self._root / f"{family}-{tied}-{seed}"
        if not path.exists():
            make_tiny(path, family=family, vocab_size=320, hidden=64, layers=2, seed=seed, tied=tied)
        return path

    def engine(self, folder=None, version=0, **settings):
        folder = folder or self.folder()
        engine = VllmEngine(folder, **(SETTINGS | {"compiled": False} | settings))
        if version >= 0:
            load_folder(engine, folder, version)
        return engine

    def native(self, folder=None):
        folder = folder or self.folder()
        engine = NativeEngine(folder, **SETTINGS)
        load_folder(engine, folder, 0)
        return engine

    def prompt(self, length=40, seed=0):
        return np.random.default_rng(seed).integers(3, 320, length).astype(np.int32)

    def group(self, group_id=0, count=4, cap=12, partials=None, prompt=None, **sampling):
        samples = tuple(SampleId(group_id, index) for index in range(count))
        seeds = tuple(sample_seed(0, sample) for sample in samples)
        prompt = self.prompt() if prompt is None else prompt
        return GroupRequest(prompt, samples, seeds, Sampling(cap, **sampling), partials)

    def run(self, engine, *requests):
        for request in requests:
            engine.submit(request)
        done = {}
        for _ in range(1000):
            if not engine.num_unfinished:
                return done
            done |= {response.sample: response for response in engine.step()}
        raise AssertionError("the engine does not finish")


@pytest.fixture(scope="session")
def vllm_lab(tmp_path_factory):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: docs/rollout.md says how to test with it")
    return VllmLab(tmp_path_factory.mktemp("vllm"))
