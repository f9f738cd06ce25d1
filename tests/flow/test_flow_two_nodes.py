"""A run on a Ray cluster of two nodes that exists already: emulated here, as two sets of Ray's daemons on 127.0.0.1."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flow_helpers import ray_nodes, wait_until
from watched_run import WatchedRun, check_whole, weights_of

import tranship
from tranship.config.load import loads
from tranship.runtime.processes import descendants, is_running

Recipe = Callable[..., dict[str, Any]]
SLOW = f"{Path(__file__).parent / 'rewards_for_tests.py'}:slow"
STEPS = 8


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two nodes."""
    with ray_nodes(2) as nodes:
        yield nodes


def processes_of(node: Any) -> set[int]:
    """The raylet of a node, and all that it has started."""
    raylet = node.all_processes["raylet"][0].process.pid
    return {raylet, *descendants(raylet)}


@pytest.mark.slow
def test_two_nodes_share_the_work_and_the_loss_of_one_costs_time_and_nothing_else(
    recipe: Recipe, tmp_path: Path, cluster: Any
) -> None:
    calm = tranship.run(loads(recipe(run__dir=str(tmp_path / "calm"), run__export=True, train__steps=STEPS))).run_dir
    changes = {
        "run__dir": str(tmp_path / "spread"),
        "run__export": True,
        "train__steps": STEPS,
        "reward__function": SLOW,
        "checkpoint__every_steps": 2,
        "dock__lease_s": 2.0,
        "placement": {
            "runtime": "ray",
            "layout": "split",
            "num_samplers": 2,
            "ray_address": cluster.address,
        },
        "observe": {"console": "plain", "trackers": []},
    }
    with WatchedRun(recipe(**changes), tmp_path) as run:
        run.wait_for_steps(1)
        (second,) = cluster.worker_nodes
        on_second = {name for name, pid in run.pids().items() if pid in processes_of(second)}
        assert on_second, "the workers are spread"
        assert "dock" not in on_second
        assert len([name for name in on_second if name.startswith("warehouse-")]) == 1, "each node keeps its own rows"
        assert set(run.pids()) - on_second - {"dock"}, "over both nodes"

        # Held for longer than a lease: the other one does its work, and it goes on afterwards.
        run.signal("sampler-0", signal.SIGSTOP)
        run.wait_for_steps(3)
        run.signal("sampler-0", signal.SIGCONT)
        run.wait_for_steps(4)
        assert not run.events("worker_died")
        assert not run.events("going_back")

        for pid in processes_of(second):
            os.kill(pid, signal.SIGKILL)
        assert run.end() == 0
        hosted = set(run.pids().values())
        told = {row["name"] for row in (*run.events("worker_died"), *run.events("going_back"))}
        assert told & on_second
        told |= {row["name"] for row in run.events("node_lost")}
        assert "trainer" in told or any(name.startswith("warehouse-") for name in told)
        wait_until(lambda: not any(is_running(pid) for pid in hosted), "the run's processes to end", 20)
    assert check_whole(tmp_path / "spread", STEPS) == check_whole(calm, STEPS)
    assert weights_of(tmp_path / "spread") == weights_of(calm)
