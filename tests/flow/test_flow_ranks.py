"""A run whose sampler is spread over two processes: it samples what one process would, and outlives each of them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from flow_helpers import ray_nodes, read_jsonl
from test_serve_in_run import Client
from watched_run import WatchedRun, check_whole, weights_of

import tranship
from tranship.config.load import loads
from tranship.models.tiny import make_tiny
from tranship.trainer.evaluate import evaluate, prepare
from tranship.trainer.preflight import preflight
from tranship.types import UserError

Recipe = Callable[..., dict[str, Any]]
SLOW = f"{Path(__file__).parent / 'rewards_for_tests.py'}:slow"
STEPS = 6


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A node with cores for a trainer and two ranks, whatever this machine has."""
    with ray_nodes(1) as nodes:
        yield nodes


@pytest.fixture
def on_two_ranks(recipe: Recipe, cluster: Any) -> Recipe:
    """Recipes of runs whose sampler has two ranks."""

    def make(folder: Path, **changes: Any) -> dict[str, Any]:
        return recipe(
            run__dir=str(folder),
            run__export=True,
            train__steps=STEPS,
            rollout__tensor_parallel=2,
            placement={"runtime": "ray", "layout": "split", "ray_address": cluster.address},
            observe={"console": "plain", "trackers": []},
            **changes,
        )

    return make


@pytest.mark.slow
def test_a_run_on_two_ranks_is_that_on_one_up_to_rounding_and_outlives_each_of_them(
    recipe: Recipe, on_two_ranks: Recipe, tmp_path: Path
) -> None:
    one = tranship.run(loads(recipe(run__dir=str(tmp_path / "one"), run__export=True, train__steps=STEPS))).run_dir
    client = Client(tmp_path / "two")
    client.start()
    with WatchedRun(on_two_ranks(tmp_path / "two", serve__enabled=True), tmp_path) as run:
        assert run.end() == 0
        client.join(60)
        assert client.answers, "whoever asks beside the run changes nothing"
        assert not run.events("worker_died")
        assert run.pids().keys() >= {"sampler-0", "sampler-0-rank-1"}
        assert "sampler-0 (reward, rollout, 2 ranks)" in run.output()
    assert check_whole(tmp_path / "two", STEPS) == check_whole(one, STEPS)
    assert sampled(tmp_path / "two") == sampled(one)
    for name, weight in tensors(one).items():
        assert np.abs(weight - tensors(tmp_path / "two")[name]).max() <= 1e-4, name

    with WatchedRun(on_two_ranks(tmp_path / "stormy", reward__function=SLOW), tmp_path) as run:
        run.wait_for_steps(1)
        time.sleep(0.3)
        run.signal("sampler-0-rank-1", signal.SIGKILL)
        died = run.wait_for("worker_died", timeout_s=10)
        assert died["name"] in ("sampler-0", "sampler-0-rank-1")
        assert died["successor"] == "sampler-0.1"
        assert run.wait_for("worker_replaced")["name"] == "sampler-0.1"
        run.wait_for_steps(3)
        run.signal("sampler-0.1", signal.SIGKILL)
        assert run.wait_for("worker_died", 2, timeout_s=10)["successor"] == "sampler-0.2"
        assert run.end() == 0
        assert len(run.events("worker_died")) == 2
        assert not run.events("going_back")
    assert check_whole(tmp_path / "stormy", STEPS) == check_whole(tmp_path / "two", STEPS)
    assert weights_of(tmp_path / "stormy") == weights_of(tmp_path / "two")


@pytest.mark.slow
def test_an_evaluation_on_two_ranks_samples_what_one_would(
    recipe: Recipe, on_two_ranks: Recipe, tiny_model: Path, tmp_path: Path
) -> None:
    found = {}
    for name, values in (("one", recipe()), ("two", on_two_ranks(tmp_path / "run"))):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(values))
        evaluated = evaluate(prepare(str(tiny_model), path, samples=2, out=tmp_path / f"{name}.json"))
        assert evaluated is not None
        found[name] = [(row["output"], row["score"]) for row in read_jsonl(evaluated.prepared.samples_file)]
    assert len(found["one"]) > 4
    assert found["one"] == found["two"]


def sampled(run_dir: Path) -> list[tuple[Any, ...]]:
    """What was sampled, in the order of the groups."""
    rows = read_jsonl(run_dir / "samples.jsonl")
    return sorted((row["group_id"], row["sample_index"], row["output"], row["num_tokens"]) for row in rows)


def tensors(run_dir: Path) -> dict[str, np.ndarray]:
    """The trained weights, fp32."""
    return {name: np.frombuffer(content, np.float32) for name, content in weights_of(run_dir).items()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "rollout.tensor_parallel 2 needs processes that only sample: use placement.runtime=ray"),
        ({"rollout__engine": "vllm", "run__deterministic": False}, "needs rollout.engine=native, not vllm"),
        (
            {"rollout__tensor_parallel": 3, "placement": {"runtime": "ray", "layout": "split", "ray_address": "auto"}},
            "rollout.tensor_parallel 3 does not divide the model's 4 attention heads.*: use one of 1, 2, 4",
        ),
    ],
)
def test_what_cannot_be_spread_is_said_before_the_start(recipe: Recipe, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        preflight(loads(recipe(**{"rollout__tensor_parallel": 2, **changes})))


def on_device(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """What this machine has is found to be another device."""
    monkeypatch.setattr(import_module("tranship.trainer.preflight"), "resolve_device", lambda name: device)


def test_graphs_without_their_device_are_refused_before_the_start(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device(monkeypatch, "npu")
    with pytest.raises(UserError, match=r"rollout\.cuda_graphs needs a CUDA device, and this run has npu: set it to f"):
        preflight(loads(recipe(rollout__cuda_graphs=True, run__deterministic=False)))


def test_graphs_of_a_mixture_are_refused_before_the_start(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_device(monkeypatch, "cuda")
    model = str(make_tiny(tmp_path / "mixture", family="qwen3_moe"))
    with pytest.raises(UserError, match=r"rollout\.cuda_graphs needs a dense model"):
        preflight(loads(recipe(rollout__cuda_graphs=True, run__deterministic=False, model__path=model)))
