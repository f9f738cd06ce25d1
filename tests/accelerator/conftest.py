"""The device of these tests: this machine's accelerator. Without one they are skipped.

TRANSHIP_TEST_DEVICE=cpu runs them on the CPU instead, to try the tests themselves.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tranship.models.tiny import make_tiny
from tranship.types import SampleId, TrainBatch


@pytest.fixture(scope="session")
def device() -> str:
    """The device type, as `placement.device` names it."""
    asked = os.environ.get("TRANSHIP_TEST_DEVICE")
    if asked:
        return asked
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        pytest.skip(f"no accelerator: torch {torch.__version__} sees none")
    return accelerator.type


@pytest.fixture(scope="session", params=["llama", "qwen3"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model of each family, with a tokenizer; vocabulary 512."""
    folder = tmp_path_factory.mktemp("models") / request.param
    return make_tiny(folder, family=request.param, vocab_size=512, hidden=64, layers=2)


@pytest.fixture
def batch() -> TrainBatch:
    """3 groups of 4 samples, ragged responses of 1 to 24 tokens, one row masked."""
    random = np.random.default_rng(5)
    prompts = [random.integers(3, 512, size, dtype=np.int32) for size in (7, 33, 12)]
    lengths = [1, 24, *random.integers(2, 25, 10).tolist()]
    masks = [np.ones(n, dtype=bool) for n in lengths]
    masks[-1][:] = False
    return TrainBatch(
        samples=[SampleId(row // 4, row % 4) for row in range(12)],
        prompts=prompts,
        group_of=np.repeat(np.arange(3), 4),
        responses=[random.integers(3, 512, n, dtype=np.int32) for n in lengths],
        response_mask=masks,
        logprobs=[(random.standard_normal(n) * 0.1 - 6.2).astype(np.float32) for n in lengths],
        advantages=[np.full(n, random.standard_normal(), dtype=np.float32) for n in lengths],
    )
