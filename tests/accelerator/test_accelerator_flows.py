"""On the device: weights travel whole and right from trainer to sampler, and a recipe trains in one process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tranship.config import Config, TrainConfig
from tranship.rollout.native.engine import NativeEngine
from tranship.stages.stage import Stopwatch
from tranship.train.transformers_engine import TransformersEngine
from tranship.trainer import run
from tranship.types import RunError
from tranship.worker.weights import FetchedWeights, LocalWeights, Probe, PublishedWeights, plan_weights

pytestmark = pytest.mark.accelerator

IDS = tuple(range(3, 40))


@pytest.fixture
def trainer(device: str, model_dir: Path) -> TransformersEngine:
    return TransformersEngine(
        model_dir,
        config=TrainConfig(steps=1),
        temperature=1.0,
        max_response_tokens=8,
        num_steps=1,
        device=device,
        seed=0,
        deterministic=False,
    )


@pytest.fixture(params=["fp32", "bf16"])
def sampler(request: pytest.FixtureRequest, device: str, model_dir: Path) -> NativeEngine:
    return NativeEngine(
        model_dir,
        dtype=request.param,
        device=device,
        max_running=4,
        max_tokens=64,
        on_update="recompute",
        deterministic=False,
        eos_token_ids=(2,),
    )


def probe_of(sampler: NativeEngine) -> Probe:
    dtype = sampler.pieces()[0].dtype
    return Probe(IDS, 1.0, {"float32": "fp32", "bfloat16": "bf16"}[dtype])


def assert_same_weights(trainer: TransformersEngine, sampler: NativeEngine) -> None:
    source = {piece.name: trainer.storage(piece.storage) for piece in trainer.pieces()}
    for piece in sampler.pieces():
        stored = sampler.storage(piece.storage)[tuple(slice(*bounds) for bounds in piece.storage_box)]
        sent = source[piece.name][tuple(slice(*bounds) for bounds in piece.box)]
        assert torch.equal(stored.reshape(sent.shape), sent.to(stored.dtype)), piece.name


def change(trainer: TransformersEngine) -> None:
    with torch.no_grad():
        for piece in trainer.pieces():
            weight = trainer.storage(piece.storage)
            weight.add_(torch.randn_like(weight) * 0.02)


def test_weights_arrive_in_one_process(trainer: TransformersEngine, sampler: NativeEngine) -> None:
    weights = LocalWeights(trainer, sampler, probe_of(sampler), Stopwatch())
    for version in (0, 1):
        weights.publish(version)
        assert sampler.policy_version == version
        assert_same_weights(trainer, sampler)
        change(trainer)


def test_weights_arrive_through_published_buckets(trainer: TransformersEngine, sampler: NativeEngine) -> None:
    plan, probe, shelf = plan_weights(trainer.pieces(), [sampler.pieces()]), probe_of(sampler), {}

    def put(bucket: np.ndarray) -> int:
        shelf[len(shelf)] = bucket.copy()
        return len(shelf) - 1

    published = PublishedWeights(trainer, plan, probe, put, Stopwatch())
    fetched = FetchedWeights(sampler, plan, probe, lambda ref, limit_s: shelf[ref], Stopwatch())
    fetched.announce(published.publish(3))
    assert fetched.update()
    assert sampler.policy_version == 3
    assert_same_weights(trainer, sampler)

    change(trainer)
    ready = published.publish(4)
    shelf[len(shelf) - 1].reshape(-1)[17] ^= 1
    fetched.announce(ready)
    with pytest.raises(RunError):
        fetched.update()


def test_weights_that_changed_on_the_way_are_refused_by_the_probe(
    trainer: TransformersEngine, sampler: NativeEngine
) -> None:
    weights = LocalWeights(trainer, sampler, probe_of(sampler), Stopwatch())
    weights.publish(0)
    expected = probe_of(sampler).of_trainer(trainer)
    with torch.no_grad():
        sampler.begin_update()
        for piece in sampler.pieces():
            sampler.storage(piece.storage).mul_(1.5)
        sampler.finish_update(1)
    with pytest.raises(RunError):
        probe_of(sampler).check(1, expected, sampler)


@pytest.mark.parametrize("model_dir", ["llama"], indirect=True)
@pytest.mark.parametrize(("precision", "staleness"), [("fp32", 0), ("bf16", 1)])
def test_a_recipe_trains_inline(device: str, model_dir: Path, tmp_path: Path, precision: str, staleness: int) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return sum(c in 'aeiou0123456789' for c in solution_str) / max(1, len(solution_str))\n"
    )
    config = Config.model_validate(
        {
            "run": {"dir": str(tmp_path / "run"), "export": True},
            "model": {"path": str(model_dir)},
            "data": {"train": {"source": "sums", "args": {"low": 1, "high": 9, "num_val": 4}}},
            "rollout": {"group_size": 4, "max_response_tokens": 16, "dtype": precision},
            "reward": {"function": f"{reward}:compute_score"},
            "train": {"steps": 3, "batch_size": 16, "precision": precision, "optimizer": {"learning_rate": 1e-3}},
            "placement": {"device": device},
            "dock": {"staleness": staleness},
            "validation": {"before_training": False, "after_training": False},
            "observe": {"console": "off", "trackers": ()},
        }
    )
    result = run(config)
    assert result.status == "completed"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert max(row["staleness/max"] for row in rows) <= staleness
    gaps = [row["mismatch/logprob_gap_max"] for row in rows if "mismatch/logprob_gap_max" in row]
    assert gaps
    assert max(gaps) <= (1e-4 if precision == "fp32" else 0.3)
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
