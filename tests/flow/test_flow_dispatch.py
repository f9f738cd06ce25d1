"""Two samplers of a real run: one is held, one is killed. Work moves to the other one, and a successor gets none before
its weights have been updated and probed."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines_for_tests import BROKEN, NOTES, notes_of, pids_of, words_of
from flow_helpers import wait_until
from ray import cluster_utils
from watched_run import WatchedRun, check_whole, weights_of

import tranship
from tranship.cli.ledger import read_account
from tranship.config.load import loads

Recipe = Callable[..., dict[str, Any]]
HERE = Path(__file__).parent
STEPS = 6
# Of several processes that load their libraries, on a machine that has more to do.
START_S = 240
CHANGES = {
    "placement__runtime": "ray",
    "placement__layout": "split",
    "placement__num_samplers": 2,
    "run__export": True,
    "observe": {"console": "plain", "trackers": []},
    "rollout__engine": f"{HERE / 'engines_for_tests.py'}:NotedEngine",
    "reward__function": f"{HERE / 'rewards_for_tests.py'}:slow",
    "dock__lease_s": 2.0,
    "train__steps": STEPS,
}


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where engines of the test write."""
    folder = tmp_path / "notes"
    folder.mkdir()
    monkeypatch.setenv(NOTES, str(folder))
    return folder


@pytest.fixture
def address(notes: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a Ray that has a core for each of the three processes, whatever this machine has."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    # A folder of its own, with a short name: Ray puts sockets into it, and what `auto` finds.
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        node = {"num_cpus": 4, "object_store_memory": 100 << 20, "node_ip_address": "127.0.0.1"}
        (home := Path(folder) / "ray").mkdir()
        monkeypatch.setenv("RAY_TMPDIR", folder)
        head = {**node, "include_dashboard": False, "temp_dir": str(home)}
        cluster = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        try:
            yield cluster.address
        finally:
            cluster.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_work_moves_from_a_held_and_a_killed_sampler_and_the_weights_are_those_of_a_calm_run(
    recipe: Recipe, tmp_path: Path, notes: Path, address: str
) -> None:
    calm = tranship.run(loads(recipe(run__dir=str(tmp_path / "calm"), run__export=True, train__steps=STEPS))).run_dir
    changes = {**CHANGES, "placement__ray_address": address}
    with WatchedRun(recipe(run__dir=str(tmp_path / "stormy"), **changes), tmp_path) as run:
        run.wait_for_steps(1, START_S)
        held = run.pids()["sampler-0"]
        os.kill(held, signal.SIGSTOP)
        run.wait_for_steps(len(run.steps()) + 1)
        with contextlib.suppress(ProcessLookupError):
            os.kill(held, signal.SIGCONT)
        run.signal("sampler-1", signal.SIGKILL)
        assert run.end(START_S) == 0
        assert "sampler-1" in [row["name"] for row in run.events("worker_died")]
        assert not run.events("going_back")
    assert check_whole(tmp_path / "stormy", STEPS) == check_whole(calm, STEPS)
    assert weights_of(tmp_path / "stormy") == weights_of(calm)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_successor_is_given_work_only_after_an_update_and_a_probe(
    recipe: Recipe, tmp_path: Path, notes: Path, address: str
) -> None:
    changes = {**CHANGES, "train__steps": 1000, "placement__ray_address": address}
    with WatchedRun(recipe(run__dir=str(tmp_path / "again"), **changes), tmp_path) as run:
        run.wait_for_steps(1, START_S)
        first = set(run.pids().values())
        run.signal("sampler-1", signal.SIGKILL)
        successor = run.wait_for("worker_replaced", timeout_s=START_S)
        assert successor["name"] == "sampler-1.1"
        wait_until(lambda: "submit" in words_of(notes, successor["pid"]), "a request for the successor", 60)
        assert read_account(run.dir).balances

        (notes / BROKEN).touch()
        os.kill(successor["pid"], signal.SIGKILL)
        assert run.end(START_S) == 1, "the next one's log-probs are wrong"
        assert len(run.events("worker_replaced")) == 1
        assert "the sampler's log-probs are not the trainer's" in run.output()
    said = notes_of(notes, successor["pid"])
    assert said[0] == ("update", said[1][1])
    assert said[0][1] >= 1, "it begins with the weights of the run, not with those of its start"
    for place, (word, version) in enumerate(said):
        if word == "update":
            assert said[place + 1] == ("probe", version), "nothing comes between an update and its probe"
    (wrong,) = pids_of(notes) - first - {successor["pid"]}
    assert words_of(notes, wrong) == ["update", "probe"]
