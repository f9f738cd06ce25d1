"""Whole runs in both runtimes: what they leave, that they repeat, and that bound 0 is the same everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flow_helpers import read_jsonl
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tranship
from tranship.config.load import load, loads
from tranship.models.tiny import make_tiny

Recipe = Callable[..., dict[str, Any]]

PLACEMENTS = {
    "inline-fused": {},
    "ray-fused": {"placement__runtime": "ray"},
    "ray-split": {"placement__runtime": "ray", "placement__layout": "split"},
}


def _weights(run_dir: Path) -> dict[str, torch.Tensor]:
    name = (run_dir / "checkpoints" / "latest").read_text()
    return load_file(run_dir / "checkpoints" / name / "model" / "model.safetensors")


def _same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_leaves_what_it_promises(recipe: Recipe) -> None:
    config = loads(
        recipe(
            run__export=True,
            validation__before_training=True,
            validation__after_training=True,
            validation__samples_per_prompt=2,
            observe__trackers=["tensorboard"],
        )
    )
    result = tranship.run(config)
    run_dir = result.run_dir
    assert result.status == "completed"
    summary = json.loads((run_dir / "summary.json").read_text())
    for key in ("val_before", "val_after", "val_greedy_before", "val_greedy_after", "train_seconds", "tokens_per_s"):
        assert np.isfinite(summary[key]), key
    assert summary["steps"] == 3
    steps = [row for row in read_jsonl(run_dir / "metrics.jsonl") if row["kind"] == "step"]
    assert [row["step"] for row in steps] == [1, 2, 3]
    samples = read_jsonl(run_dir / "samples.jsonl")
    assert len(samples) == 3 * 8
    assert {"input", "output", "gts", "score", "step"} <= samples[0].keys()
    assert len(read_jsonl(run_dir / "val_samples.jsonl")) == 2 * (4 * 2 + 4)
    assert list((run_dir / "tensorboard").glob("events.*"))
    assert (run_dir / "config.yaml").is_file()
    model = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    assert _same(_weights(run_dir), load_file(run_dir / "model" / "model.safetensors"))
    assert model.config.tie_word_embeddings


def test_the_ledger_balances_and_every_group_is_used_once(recipe: Recipe) -> None:
    result = tranship.run(loads(recipe()))
    ledger = result.summary["ledger"]
    assert ledger["admitted"] == 3 * 2
    assert ledger["in_flight"] == 0
    assert ledger["trained"] + sum(ledger["dropped"].values()) == ledger["admitted"]
    rows = read_jsonl(result.run_dir / "samples.jsonl")
    ids = [(row["group_id"], row["sample_index"]) for row in rows]
    assert sorted(ids) == [(group, index) for group in range(6) for index in range(4)]


def test_the_log_prob_gap_is_rounding_only(recipe: Recipe) -> None:
    result = tranship.run(loads(recipe()))
    steps = [row for row in read_jsonl(result.run_dir / "metrics.jsonl") if row["kind"] == "step"]
    gaps = [row["mismatch/logprob_gap_max"] for row in steps]
    assert len(gaps) == 3
    assert max(gaps) <= 1e-4


@pytest.mark.slow
def test_bound_0_gives_the_same_weights_in_every_placement(recipe: Recipe, tmp_path: Path) -> None:
    weights, samples = {}, {}
    for name, changes in PLACEMENTS.items():
        result = tranship.run(loads(recipe(run__dir=str(tmp_path / name), **changes)))
        weights[name] = _weights(result.run_dir)
        rows = read_jsonl(result.run_dir / "samples.jsonl")
        samples[name] = sorted((row["group_id"], row["sample_index"], row["output"], row["score"]) for row in rows)
    assert samples["ray-fused"] == samples["inline-fused"]
    assert samples["ray-split"] == samples["inline-fused"]
    assert _same(weights["ray-fused"], weights["inline-fused"])
    assert _same(weights["ray-split"], weights["inline-fused"])


POLICIES = {
    "oldest": {"rollout": "oldest_first", "reward": "oldest_first", "advantage": "oldest_first"},
    "balanced": {"reward": "balanced", "advantage": "balanced"},
    "dispatch": {"rollout": "dispatch"},
    "ordered": {"rollout": "ordered", "reward": "ordered", "advantage": "ordered", "validate": "ordered"},
}


@pytest.mark.parametrize("policies", POLICIES.values(), ids=POLICIES.keys())
def test_bound_0_gives_the_same_weights_under_every_policy(
    recipe: Recipe, tmp_path: Path, policies: dict[str, str]
) -> None:
    first_come = tranship.run(loads(recipe(run__dir=str(tmp_path / "first_come"))))
    other = tranship.run(loads(recipe(run__dir=str(tmp_path / "other"), dock__policies=policies)))
    assert _same(_weights(first_come.run_dir), _weights(other.run_dir))


@pytest.mark.slow
@pytest.mark.parametrize("policies", POLICIES.values(), ids=POLICIES.keys())
def test_policies_give_the_same_weights_where_samplers_share_stages(
    recipe: Recipe, tmp_path: Path, policies: dict[str, str]
) -> None:
    """Samplers have a process of their own, and the small dock lies in shared memory."""
    split = {**PLACEMENTS["ray-split"], "dock__preset": "small"}
    inline = tranship.run(loads(recipe(run__dir=str(tmp_path / "inline"))))
    other = tranship.run(loads(recipe(run__dir=str(tmp_path / "other"), dock__policies=policies, **split)))
    assert _same(_weights(inline.run_dir), _weights(other.run_dir))


@pytest.mark.slow
def test_the_tiny_recipe_runs_in_a_dock_of_32_mib(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    changes = [f"run.dir={tmp_path / 'run'}", f"model.path={tiny_model}", "dock.preset=small", "observe.console=off"]
    short = ["train.steps=4", "validation.before_training=false", "validation.after_training=false"]
    config = load(root / "recipes" / "tiny.yaml", [*changes, "run.export=false", "observe.trackers=[]", *short])
    assert config.dock.capacity_bytes == 32 << 20
    result = tranship.run(config)
    assert result.summary["val_after"] is None
    assert len(read_jsonl(result.run_dir / "metrics.jsonl")) >= config.train.steps


@pytest.mark.slow
def test_validation_ends_where_samplers_have_processes_of_their_own(recipe: Recipe) -> None:
    """More groups than are sampled at once, so that scores come in over many passes."""
    val = {"source": "sums", "args": {"low": 1, "high": 20, "split": "val", "num_val": 40}}
    changes = {"before_training": True, "after_training": True, "samples_per_prompt": 2}
    split = {"placement__runtime": "ray", "placement__layout": "split", "rollout__max_running": 8}
    result = tranship.run(loads(recipe(data__val=val, validation=changes, train__steps=1, **split)))
    assert result.summary["val_before"] is not None
    assert result.summary["val_after"] is not None


def test_another_seed_gives_other_weights(recipe: Recipe, tmp_path: Path) -> None:
    first = tranship.run(loads(recipe(run__dir=str(tmp_path / "a"))))
    again = tranship.run(loads(recipe(run__dir=str(tmp_path / "b"))))
    other = tranship.run(loads(recipe(run__dir=str(tmp_path / "c"), run__seed=4)))
    assert _same(_weights(first.run_dir), _weights(again.run_dir))
    assert not _same(_weights(first.run_dir), _weights(other.run_dir))


@pytest.mark.parametrize("changes", [{}, PLACEMENTS["ray-split"]], ids=["inline", "ray-split"])
def test_staleness_stays_within_its_bound(recipe: Recipe, changes: dict[str, Any]) -> None:
    result = tranship.run(
        loads(recipe(run__deterministic=False, train__steps=8, dock__staleness=2, rollout__max_running=8, **changes))
    )
    assert result.status == "completed"
    steps = [row for row in read_jsonl(result.run_dir / "metrics.jsonl") if row["kind"] == "step"]
    stale = [row["staleness/max"] for row in steps if "staleness/max" in row]
    assert stale
    assert max(stale) <= 2
    assert max(stale) > 0
    rows = read_jsonl(result.run_dir / "samples.jsonl")
    assert len({(row["group_id"], row["sample_index"]) for row in rows}) == len(rows) == 8 * 8


def test_a_kl_term_brings_a_reference_and_none_without(recipe: Recipe, tmp_path: Path) -> None:
    plain = tranship.run(loads(recipe(run__dir=str(tmp_path / "plain"))))
    zero = tranship.run(loads(recipe(run__dir=str(tmp_path / "zero"), algorithm__kl={"coef": 0.0, "estimator": "k1"})))
    pulled = tranship.run(loads(recipe(run__dir=str(tmp_path / "kl"), algorithm__kl={"coef": 5.0})))
    assert _same(_weights(plain.run_dir), _weights(zero.run_dir))
    assert not _same(_weights(plain.run_dir), _weights(pulled.run_dir))
    steps = [row for row in read_jsonl(pulled.run_dir / "metrics.jsonl") if row["kind"] == "step"]
    assert steps[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-6)
    assert steps[-1]["actor/kl_loss"] > 0


def test_a_run_that_goes_on_equals_one_that_never_stopped(recipe: Recipe, tmp_path: Path) -> None:
    whole = tranship.run(loads(recipe(run__dir=str(tmp_path / "whole"), train__steps=4)))
    halves = recipe(run__dir=str(tmp_path / "halves"), train__steps=2)
    tranship.run(loads(halves))
    second = recipe(run__dir=str(tmp_path / "halves"), run__resume="auto", train__steps=4)
    resumed = tranship.run(loads(second))
    assert resumed.run_dir == tmp_path / "halves"
    assert _same(_weights(whole.run_dir), _weights(resumed.run_dir))
    steps = [row for row in read_jsonl(resumed.run_dir / "metrics.jsonl") if row["kind"] == "step"]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert resumed.summary["ledger"]["admitted"] == 8


def test_resuming_under_other_settings_is_refused_by_name(recipe: Recipe) -> None:
    tranship.run(loads(recipe(train__steps=1)))
    changed = recipe(run__resume="auto", run__seed=9, train__optimizer={"learning_rate": 1e-4})
    with pytest.raises(tranship.types.UserError, match=r"run.seed was 3 and is 9; train.optimizer.learning_rate was"):
        tranship.run(loads(changed))


def test_rewards_that_always_fail_stop_the_run_with_the_reason(recipe: Recipe) -> None:
    function = f"{Path(__file__).parent / 'rewards_for_tests.py'}:broken"
    with pytest.raises(tranship.types.RunError, match=r"3 steps in a row .*LookupError: no answer key"):
        tranship.run(loads(recipe(reward__function=function, train__steps=9)))


def test_a_stop_string_ends_responses(recipe: Recipe, tmp_path: Path) -> None:
    free = recipe(run__dir=str(tmp_path / "free"), train__steps=1)
    tranship.run(loads(free))
    texts = [row["output"] for row in read_jsonl(tmp_path / "free" / "samples.jsonl")]
    character = next(
        c for c in "".join(texts) if c.isascii() and c.isprintable() and sum(c in t[:-1] for t in texts) > 1
    )
    stopped = recipe(run__dir=str(tmp_path / "stopped"), train__steps=1, rollout__stop_strings=[character])
    tranship.run(loads(stopped))
    rows = read_jsonl(tmp_path / "stopped" / "samples.jsonl")
    ended = [row for row in rows if character in row["output"]]
    assert ended
    assert all(row["finish_reason"] == "stop" for row in ended)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_mixtures_of_experts_train_and_arrive(recipe: Recipe, tmp_path: Path, family: str) -> None:
    """Stacked experts of the trainer go to the sampler one by one; what it samples with is what is trained."""
    model = make_tiny(tmp_path / family, family, hidden=64, layers=2)
    result = tranship.run(loads(recipe(model__path=str(model), run__export=True, train__steps=2)))
    steps = [row for row in read_jsonl(result.run_dir / "metrics.jsonl") if row["kind"] == "step"]
    assert max(row["mismatch/logprob_gap_max"] for row in steps) < 1e-4
    before, after = load_file(model / "model.safetensors"), load_file(result.run_dir / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(".experts." in name for name in moved)
