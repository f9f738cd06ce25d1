"""A run goes on by itself when its processes are killed or held: nothing is lost, nothing is counted twice, and in
deterministic mode with bound 0 the weights are those of a run that nobody disturbed."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_flow_reward_model import scorer, scores
from watched_run import WatchedRun, check_whole, weights_of

import tranship
from tranship.cli.ledger import read_account
from tranship.config.load import loads

Recipe = Callable[..., dict[str, Any]]
SLOW = f"{Path(__file__).parent / 'rewards_for_tests.py'}:slow"
OBSERVE = {"console": "plain", "trackers": []}
SPLIT = {"placement__runtime": "ray", "placement__layout": "split", "run__export": True, "observe": OBSERVE}
STEPS = 7


@pytest.fixture
def calm(recipe: Recipe, tmp_path: Path) -> Path:
    """The folder of the same run, undisturbed, in one process."""
    return tranship.run(loads(recipe(run__dir=str(tmp_path / "calm"), run__export=True, train__steps=STEPS))).run_dir


@pytest.mark.slow
def test_a_killed_sampler_trainer_and_dock_cost_time_and_nothing_else(
    recipe: Recipe, tmp_path: Path, calm: Path
) -> None:
    changes = {**SPLIT, "train__steps": STEPS, "reward__function": SLOW, "checkpoint__every_steps": 2}
    with WatchedRun(recipe(run__dir=str(tmp_path / "stormy"), **changes), tmp_path) as run:
        run.wait_for_steps(1)
        time.sleep(0.3)
        run.signal("sampler-0", signal.SIGKILL)
        died = run.wait_for("worker_died", timeout_s=10)
        assert (died["name"], died["successor"]) == ("sampler-0", "sampler-0.1")
        assert run.wait_for("worker_replaced")["name"] == "sampler-0.1"
        assert not run.events("going_back")
        account = read_account(run.dir)
        assert account.source == "the run is under way"
        assert account.balances

        run.wait_for_steps(3)
        run.signal("trainer", signal.SIGKILL)
        back = run.wait_for("going_back", timeout_s=10)
        assert (back["name"], back["step"], back["number"]) == ("trainer", 2, 1)

        run.wait_for("processes", 2)
        run.wait_for_steps(5)
        run.signal("dock", signal.SIGKILL)
        assert run.wait_for("worker_died", 2, timeout_s=10)["name"] == "dock"
        assert run.wait_for("worker_replaced", 2)["name"] == "dock"
        assert run.end() == 0
        assert len(run.events("going_back")) == 1, "a dock's successor goes on where it was"
        said = run.output()
    assert "process 'sampler-0' (pid " in said
    assert "going back to step 2 (restart 1 of at most 3)" in said
    assert "another one goes on from what it left in shared memory" in said
    assert check_whole(tmp_path / "stormy", STEPS) == check_whole(calm, STEPS)
    assert weights_of(tmp_path / "stormy") == weights_of(calm)
    assert read_account(tmp_path / "stormy").facts() == read_account(calm).facts()


@pytest.mark.slow
def test_a_killed_controller_of_a_stage_costs_time_and_nothing_else(recipe: Recipe, tmp_path: Path, calm: Path) -> None:
    changes = {**SPLIT, "train__steps": STEPS, "reward__function": SLOW, "dock__controllers": ["reward", "advantage"]}
    with WatchedRun(recipe(run__dir=str(tmp_path / "stormy"), **changes), tmp_path) as run:
        run.wait_for_steps(1)
        for number, stage in enumerate(("reward", "advantage"), 1):
            run.signal(f"controller-{stage}", signal.SIGKILL)
            assert run.wait_for("worker_died", number, timeout_s=10)["name"] == f"controller-{stage}"
        run.wait_for("worker_replaced", 2)
        assert run.end() == 0
        assert not run.events("going_back")
    assert check_whole(tmp_path / "stormy", STEPS) == check_whole(calm, STEPS)
    assert weights_of(tmp_path / "stormy") == weights_of(calm)


@pytest.mark.slow
def test_a_dock_without_a_journal_sends_the_run_back_to_its_last_cut(
    recipe: Recipe, tmp_path: Path, calm: Path
) -> None:
    changes = {**SPLIT, "train__steps": STEPS, "reward__function": SLOW, "checkpoint__every_steps": 2}
    changes["dock__journal"] = False
    with WatchedRun(recipe(run__dir=str(tmp_path / "stormy"), **changes), tmp_path) as run:
        run.wait_for_steps(3)
        run.signal("dock", signal.SIGKILL)
        back = run.wait_for("going_back", timeout_s=10)
        assert (back["name"], back["step"], back["number"]) == ("dock", 2, 1)
        assert run.end() == 0
    assert check_whole(tmp_path / "stormy", STEPS) == check_whole(calm, STEPS)
    assert weights_of(tmp_path / "stormy") == weights_of(calm)


@pytest.mark.slow
def test_a_sampler_that_is_held_goes_on_or_is_replaced(recipe: Recipe, tmp_path: Path, calm: Path) -> None:
    changes = {**SPLIT, "train__steps": STEPS, "reward__function": SLOW, "dock__lease_s": 2.0}
    with WatchedRun(recipe(run__dir=str(tmp_path / "held"), **changes), tmp_path) as run:
        run.wait_for_steps(1)
        time.sleep(0.3)
        run.signal("sampler-0", signal.SIGSTOP)
        time.sleep(3.5)
        run.signal("sampler-0", signal.SIGCONT)
        run.wait_for_steps(3)
        assert not run.events("worker_died"), "its leases were over, and it took the groups again"

        run.signal("sampler-0", signal.SIGSTOP)
        assert "is stopped (SIGSTOP)" in run.wait_for("worker_died", timeout_s=20)["cause"]
        assert run.end() == 0
        assert not run.events("going_back")
    assert check_whole(tmp_path / "held", STEPS) == check_whole(calm, STEPS)
    assert weights_of(tmp_path / "held") == weights_of(calm)


@pytest.mark.slow
def test_a_killed_reward_model_is_replaced_and_scores_the_same(
    recipe: Recipe, tiny_model: Path, tmp_path: Path
) -> None:
    model = {"path": str(scorer(tiny_model, tmp_path / "scorer")), "weight": 1.0}
    changes = {"train__steps": 4, "run__export": True, "observe": OBSERVE}
    quick = {"function": recipe()["reward"]["function"], "model": model}
    tranship.run(loads(recipe(run__dir=str(tmp_path / "calm"), reward=quick, **changes)))
    apart = {"function": SLOW, "model": {**model, "placement": "own"}}
    recipe_apart = recipe(run__dir=str(tmp_path / "apart"), reward=apart, placement__runtime="ray", **changes)
    with WatchedRun(recipe_apart, tmp_path) as run:
        run.wait_for_steps(1)
        run.signal("reward-model", signal.SIGKILL)
        assert run.wait_for("worker_died", timeout_s=10)["successor"] == "reward-model.1"
        assert run.end() == 0
        assert run.events("worker_replaced")
        assert not run.events("going_back")
    assert check_whole(tmp_path / "apart", 4) == check_whole(tmp_path / "calm", 4)
    assert scores(tmp_path / "apart") == pytest.approx(scores(tmp_path / "calm"), abs=1e-5)


@pytest.mark.slow
def test_beyond_the_limit_the_run_stops_and_names_the_cause(recipe: Recipe, tmp_path: Path) -> None:
    changes = {**SPLIT, "train__steps": 1000, "reward__function": SLOW, "run__max_restarts": 0}
    with WatchedRun(recipe(run__dir=str(tmp_path / "once"), **changes), tmp_path) as run:
        run.wait_for_steps(1)
        pid = run.pids()["trainer"]
        run.signal("trainer", signal.SIGKILL)
        assert run.end(60) == 1
        assert f"stopped: process 'trainer' (pid {pid}) died" in run.output()
        assert not run.events("going_back")
    assert json.loads((tmp_path / "once" / "summary.json").read_text())["status"] == "failed"
