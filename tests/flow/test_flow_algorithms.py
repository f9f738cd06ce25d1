"""Every algorithm on a tiny random model: it runs, its ledger balances, it repeats bit for bit, and it goes on so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flow_helpers import read_jsonl
from safetensors.numpy import load_file

from tranship.config.load import loads
from tranship.config.presets import ALGORITHMS
from tranship.trainer import Result, run
from tranship.types import RunError, UserError

Recipe = Callable[..., dict[str, Any]]
RECORDED = {"dpo": "preference", "sft": "demonstration"}


def changes_of(name: str, **changes: Any) -> dict[str, Any]:
    """A recipe's changes for an algorithm. The KL is on where its preset has a place for one."""
    values: dict[str, Any] = {"algorithm__name": name, "validation__greedy": False, **changes}
    if name in RECORDED:
        args = {"low": 1, "high": 9, "split": "train", "num_val": 4, "recorded": RECORDED[name]}
        values["data__train"] = {"source": "sums", "args": args}
    elif ALGORITHMS[name].sets.get("kl"):
        values["algorithm__kl"] = {"coef": 0.05}
    return values


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(a[name].tobytes() == b[name].tobytes() for name in a)


def go(recipe: Recipe, run_dir: Path, name: str, **changes: Any) -> Result:
    return run(loads(recipe(run__dir=str(run_dir), run__export=True, **changes_of(name, **changes))))


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_trains_and_its_ledger_balances(recipe: Recipe, tmp_path: Path, name: str) -> None:
    result = go(recipe, tmp_path / "run", name, train__steps=2)
    ledger = result.summary["ledger"]
    assert ledger["admitted"] == ledger["trained"] + sum(ledger["dropped"].values()) + ledger["in_flight"]
    steps = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "step"]
    assert [row["step"] for row in steps] == [1, 2]
    moved = weights(tmp_path / "run" / "model")
    start = weights(Path(recipe()["model"]["path"]))
    assert any((moved[key] != start[key]).any() for key in moved)
    if name in RECORDED:
        assert ledger["trained"] == 2 * {"dpo": 4, "sft": 8}[name]
    if name == "dapo":
        assert ledger["trained"] == 4
        assert set(ledger["dropped"]) <= {"filtered"}


@pytest.mark.parametrize("name", ["dapo", "ppo", "dpo", "reinforce_pp"])
def test_a_run_that_goes_on_equals_one_that_never_stopped(recipe: Recipe, tmp_path: Path, name: str) -> None:
    """Critic, reference, refilled batches and recorded data are part of the cut, or follow from it."""
    whole = go(recipe, tmp_path / "whole", name, train__steps=3)
    go(recipe, tmp_path / "parts", name, train__steps=1)
    rest = go(recipe, tmp_path / "parts", name, train__steps=3, run__resume="auto")
    assert same(weights(tmp_path / "whole" / "model"), weights(tmp_path / "parts" / "model"))
    assert rest.summary["ledger"] == whole.summary["ledger"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dapo", "ppo"])
def test_bound_0_gives_the_same_weights_in_every_placement(recipe: Recipe, tmp_path: Path, name: str) -> None:
    correction = {"name": "truncated_token"}
    go(recipe, tmp_path / "inline", name, train__steps=2, algorithm__correction=correction)
    split = {"placement__runtime": "ray", "placement__layout": "split"}
    go(recipe, tmp_path / "ray", name, train__steps=2, algorithm__correction=correction, **split)
    assert same(weights(tmp_path / "inline" / "model"), weights(tmp_path / "ray" / "model"))


def test_a_kl_of_0_is_bit_equal_to_having_no_reference(recipe: Recipe, tmp_path: Path) -> None:
    go(recipe, tmp_path / "none", "grpo", train__steps=2)
    go(recipe, tmp_path / "zero", "grpo", train__steps=2, algorithm__kl={"coef": 0.0, "where": "reward"})
    assert same(weights(tmp_path / "none" / "model"), weights(tmp_path / "zero" / "model"))
    steps = [row for row in read_jsonl(tmp_path / "zero" / "metrics.jsonl") if row["kind"] == "step"]
    assert not any(key.startswith("timing_s/ref") for key in steps[0])


def test_dynamic_sampling_that_finds_no_signal_stops_and_says_so(recipe: Recipe, tmp_path: Path) -> None:
    always = f"{Path(__file__).parent / 'rewards_for_tests.py'}:always_one"
    with pytest.raises(RunError, match=r"dynamic sampling replaced \d+ groups.*max_refills"):
        go(recipe, tmp_path / "run", "dapo", train__steps=1, reward__function=always, algorithm__max_refills=2)


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize(
    "correction", ["truncated_token", "truncated_sequence", "band_token", "band_sequence", "decoupled"]
)
def test_corrections_are_nearly_1_where_sampler_and_trainer_agree(
    recipe: Recipe, tmp_path: Path, correction: str, minibatches: int
) -> None:
    """At the second optimizer step of a batch too: the proximal policy is that of before the first one."""
    changes = {"algorithm__correction": {"name": correction}, "train__minibatches": minibatches}
    go(recipe, tmp_path / "run", "grpo", train__steps=1, **changes)
    step = next(row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "step")
    weight = next(value for key, value in step.items() if key.endswith("weight_mean"))
    assert weight == pytest.approx(1.0, abs=1e-4)
    ratio = next(value for key, value in step.items() if key.endswith("ratio_mean"))
    assert (abs(ratio - 1.0) > 1e-4) == (minibatches > 1), "the policy has moved since"


def test_the_epochs_border_changes_nothing(recipe: Recipe, tmp_path: Path) -> None:
    """2 groups a step over 3 prompts: a batch holds the end of one epoch and the start of the next."""
    data = {
        "data__train": {"source": "sums", "args": {"low": 1, "high": 9, "split": "train", "num_val": 4}, "limit": 3}
    }
    go(recipe, tmp_path / "whole", "grpo", train__steps=4, **data)
    for steps in (1, 2, 4):
        go(recipe, tmp_path / "parts", "grpo", train__steps=steps, run__resume="auto", **data)
    assert same(weights(tmp_path / "whole" / "model"), weights(tmp_path / "parts" / "model"))
    rows = read_jsonl(tmp_path / "parts" / "samples.jsonl")
    asked = [row["input"] for row in rows if row["sample_index"] == 0]
    assert len(asked) == 8
    assert all(asked[:6].count(text) == 2 for text in set(asked[:6]))


@pytest.mark.slow
@pytest.mark.parametrize("kl", [{"coef": 0.05}, {"coef": 0.05, "where": "loss"}])
def test_ragged_lengths_under_a_critic_and_a_kl_are_the_same_in_every_placement(
    recipe: Recipe, tmp_path: Path, kl: dict[str, Any]
) -> None:
    """Which groups are ready together depends on the placement; what is computed of them must not."""
    ragged = {"stop_token_ids": list(range(20, 60)), "max_running": 4, "group_size": 4, "max_response_tokens": 12}
    common: dict[str, Any] = {"train__steps": 2, "train__batch_size": 16, "rollout": ragged}
    for placement, changes in (
        ("inline", {}),
        ("ray", {"placement__runtime": "ray", "placement__layout": "split"}),
    ):
        values = recipe(run__dir=str(tmp_path / placement), run__export=True, **common, **changes)
        values["algorithm"] = {"name": "ppo", "kl": kl}
        run(loads(values))
    lengths = {row["num_tokens"] for row in read_jsonl(tmp_path / "ray" / "samples.jsonl")}
    assert len(lengths) > 2
    assert same(weights(tmp_path / "inline" / "model"), weights(tmp_path / "ray" / "model"))


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_the_learning_rate_follows_the_batches_of_the_run(recipe: Recipe, tmp_path: Path, name: str) -> None:
    """Also those without a signal, and those on which only the critic is trained."""
    reward = f"{Path(__file__).parent / 'rewards_for_tests.py'}:now_and_then"
    values = recipe(run__dir=str(tmp_path / "run"), train__steps=6, train__batch_size=4, reward__function=reward)
    values["train"]["optimizer"] = {"learning_rate": 6e-3, "schedule": "linear"}
    values["algorithm"] = {"name": name, **({"critic": {"warmup_steps": 3}} if name == "ppo" else {})}
    run(loads(values))
    steps = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "step"]
    rates = {row["step"]: row["actor/lr"] for row in steps if "actor/lr" in row}
    assert 0 < len(rates) < 6
    assert rates == pytest.approx({step: 6e-3 * (7 - step) / 6 for step in rates})


def test_recorded_responses_are_learned_at_temperature_1(recipe: Recipe, tmp_path: Path) -> None:
    for name, temperature in (("cold", 0.3), ("plain", 1.0)):
        go(recipe, tmp_path / name, "sft", train__steps=2, rollout__temperature=temperature)
    assert same(weights(tmp_path / "cold" / "model"), weights(tmp_path / "plain" / "model"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout__temperature": 0.0}, r"rollout\.temperature 0 gives every sample"),
        ({"rollout__stop_token_ids": [10**6]}, r"rollout\.stop_token_ids 1000000 is no token"),
        ({"rollout__group_size": 1}, r"compares the samples of a prompt, and rollout\.group_size is 1"),
        ({"algorithm": {"name": "ppo", "critic": {"warmup_steps": 3}}}, "leaves no step for the policy"),
    ],
)
def test_what_can_learn_nothing_is_refused(recipe: Recipe, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        run(loads(recipe(**changes)))


def test_steps_without_a_scored_sample_stop_the_run(recipe: Recipe) -> None:
    """All of them masked: no fault of any sample, and nothing to learn from either."""
    changes = {"rollout__ignore_eos": True, "reward__mask_truncated": True, "train__steps": 6}
    with pytest.raises(RunError, match=r"no sample of 3 steps in a row could be scored.*masked"):
        run(loads(recipe(**changes)))


def test_reasons_are_counted_by_their_class(recipe: Recipe, tmp_path: Path) -> None:
    reward = f"{Path(__file__).parent / 'rewards_for_tests.py'}:quotes_the_text"
    run(loads(recipe(reward__function=reward, train__steps=2)))
    rows = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert len({row["reason"] for row in rows if row["status"] == "invalid"}) > 2
    steps = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "step"]
    assert {key for row in steps for key in row if key.startswith("samples/invalid/")} == {"samples/invalid/ValueError"}


def test_the_last_step_is_validated_when_it_is_due(recipe: Recipe, tmp_path: Path) -> None:
    changes = {"validation__every_steps": 2, "checkpoint__best_metric": "score"}
    run(loads(recipe(train__steps=4, **changes)))
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [(row["kind"], row["step"]) for row in rows if row["kind"] != "step"] == [("during", 2), ("during", 4)]


def test_an_emptied_pointer_loses_no_run(recipe: Recipe, tmp_path: Path) -> None:
    go(recipe, tmp_path / "whole", "grpo", train__steps=3)
    go(recipe, tmp_path / "torn", "grpo", train__steps=2)
    (tmp_path / "torn" / "checkpoints" / "latest").write_text("")
    go(recipe, tmp_path / "torn", "grpo", train__steps=3, run__resume="auto")
    assert same(weights(tmp_path / "whole" / "model"), weights(tmp_path / "torn" / "model"))
    steps = [row["step"] for row in read_jsonl(tmp_path / "torn" / "metrics.jsonl") if row["kind"] == "step"]
    assert steps == [1, 2, 3]
