"""A rank that follows: what it does with versions that it knows, does not know yet, or gets damaged; how it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tranship.config.load import loads
from tranship.layouts import Piece, full_box
from tranship.models.tiny import make_tiny
from tranship.reshard import WeightSource
from tranship.rollout import RankLost
from tranship.rollout.native.leader import LeadingEngine
from tranship.runtime import Context, ProcessDied
from tranship.types import RunError
from tranship.worker import WorkerSpec
from tranship.worker.build import build_rollout_engine
from tranship.worker.rank import SamplerRank, as_death
from tranship.worker.weights import WeightsReady, plan_weights

IDS = np.arange(3, 20, dtype=np.int32)


class Shelf:
    """Arrays by their numbers."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []

    def put(self, array: np.ndarray) -> int:
        self.arrays.append(array.copy())
        return len(self.arrays) - 1

    def get(self, ref: int, timeout_s: float) -> np.ndarray:
        return self.arrays[ref]


class Pair:
    """Both ranks of a sampler: the first one here, the other in a thread that polls it."""

    def __init__(self, folder: Path) -> None:
        config = loads(
            {
                "model": {"path": str(folder)},
                "data": {"train": {"source": "sums"}},
                "rollout": {"tensor_parallel": 2},
                "train": {"steps": 1, "batch_size": 8},
                "placement": {"runtime": "ray", "layout": "split"},
            }
        )
        spec = WorkerSpec(config, (), (), str(folder), "cpu", 1, (), 64, (2,))
        self.shelf = Shelf()
        self._wakeup = threading.Event()
        context = Context("sampler-0-rank-1", self._wakeup, lambda event: None, self.shelf)
        self.leader = build_rollout_engine(spec, str, "127.0.0.1")
        assert isinstance(self.leader, LeadingEngine)
        self.rank = SamplerRank(spec, 1, context)
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()
        self.leader.lead([self.rank.door()])
        self._tensors = load_file(folder / "model.safetensors")
        source = [
            Piece(name, tuple(t.shape), full_box(tuple(t.shape)), name, full_box(tuple(t.shape)), "float32")
            for name, t in self._tensors.items()
        ]
        targets = [self.leader.pieces(), self.rank.pieces()]
        self.rank.connect_weights(source, targets)
        self._plan = plan_weights(source, targets)
        self._source = WeightSource(self._plan, self._tensors.__getitem__)

    def _poll(self) -> None:
        try:
            while not self.rank._follower.ended:
                self._wakeup.clear()
                while self.rank.poll():
                    pass
                self._wakeup.wait(0.2)
        except Exception as error:
            self.error = error

    def publish(self, version: int) -> WeightsReady:
        return WeightsReady(self._source.publish(version, self.shelf.put), np.empty(0))

    def take(self, version: int) -> None:
        """The first rank takes a version over; its own weights do not matter here."""
        self.leader.begin_update()
        self.leader.fill(str(version))
        self.leader.finish_update(version)

    def end(self) -> None:
        self.leader.close()
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.rank.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def pair(folder: Path) -> Iterator[Pair]:
    threads = torch.get_num_threads()
    made = Pair(folder)
    yield made
    made.end()
    torch.set_num_threads(threads)


def test_it_waits_for_a_version_that_it_has_not_heard_of_yet(pair: Pair) -> None:
    ready = pair.publish(0)
    taking = threading.Thread(target=pair.take, args=(0,))
    taking.start()
    time.sleep(0.5)
    assert taking.is_alive(), "the first rank has heard of it, this one not"
    pair.rank.announce_weights(ready)
    pair._wakeup.set()
    taking.join(20)
    assert not taking.is_alive()
    assert pair.leader.policy_version == 0
    assert len(pair.leader.probe(IDS)) == len(IDS) - 1


def test_it_takes_the_version_that_the_first_rank_names_and_forgets_older_ones(pair: Pair) -> None:
    for version in range(3):
        pair.rank.announce_weights(pair.publish(version))
    assert sorted(pair.rank._ready) == [1, 2], "two are kept"
    pair.take(1)
    assert sorted(pair.rank._ready) == [2]
    pair.take(2)
    assert not pair.rank._ready


def test_a_damaged_bucket_stops_the_sampler_with_its_reason(pair: Pair) -> None:
    ready = pair.publish(0)
    of_rank = next(bucket.index for bucket in pair._plan.buckets if bucket.target_rank == 1)
    pair.shelf.arrays[ready.announcement.refs[of_rank]][5] ^= 1
    pair.rank.announce_weights(ready)
    with pytest.raises(
        RunError, match=r"rank 1 of the rollout engine has failed: RunError: version 0.*damaged"
    ) as said:
        pair.take(0)
    assert not isinstance(said.value, RankLost)
    pair._thread.join(20)
    assert "damaged" in str(pair.error)


def test_without_its_first_rank_it_is_as_good_as_dead(pair: Pair) -> None:
    pair.leader._others[0].close()
    pair._thread.join(20)
    error: Any = pair.error
    assert isinstance(error, ProcessDied)
    assert error.name == "sampler-0-rank-1"
    assert "the first rank of the rollout engine is gone" in str(error)


def test_a_lost_rank_is_told_as_the_death_of_the_process_and_nothing_else_is() -> None:
    with (
        pytest.raises(ProcessDied, match=r"process 'sampler-0'.*cannot go on: rank 1 is gone") as told,
        as_death("sampler-0"),
    ):
        raise RankLost("rank 1 is gone")
    assert told.value.name == "sampler-0"
    with pytest.raises(RunError, match="no memory") as told, as_death("sampler-0"):
        raise RunError("no memory")
    assert not isinstance(told.value, ProcessDied)
