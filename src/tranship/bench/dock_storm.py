"""The storm of `bench dock`: workers, and the dock's own process, are killed and stopped at random while batches are
trained; every row is counted.

Run as a program, this file is one worker (it takes groups at one stage, writes their columns, and acknowledges), or the
dock.
"""

from __future__ import annotations

import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tranship.dock import Batch, Dock, DockClient, StageNeeds, StaleLease
from tranship.dock.durable import DurableDock
from tranship.dock.frames import ConnectionLost
from tranship.dock.service import DockService
from tranship.dock.shared_folder import default_root, left_by
from tranship.types import SampleId

STAGES = (
    StageNeeds("rollout", ("prompt",)),
    StageNeeds("score", ("response",)),
    StageNeeds("train", ("prompt", "response", "score")),
)
LEASE_S = 2.0
RECONNECT_S = 30.0
_GROUP, _BATCH = 4, 16
_WORKERS = (("rollout", 2), ("score", 2))


def response_of(sample: SampleId) -> np.ndarray:
    """What every honest worker writes for a row."""
    return np.arange(64 + sample.group_id % 64, dtype=np.int32) * 31 + sample.group_id * 8 + sample.sample_index


@dataclass
class Outcome:
    """admitted: groups. seen: how often each group was trained on. wrong: rows whose content was not theirs.
    dock_recovery_s: for each kill of the dock, how long it was until its successor answered."""

    admitted: int = 0
    seen: Counter[int] = field(default_factory=Counter)
    wrong: int = 0
    killed: int = 0
    stopped: int = 0
    dock_recovery_s: list[float] = field(default_factory=list)

    @property
    def rows_lost(self) -> int:
        """Rows that were admitted and never trained on."""
        return (self.admitted - len(self.seen)) * _GROUP + self.wrong

    @property
    def rows_counted_twice(self) -> int:
        """Rows that were trained on more than once."""
        return sum(count - 1 for count in self.seen.values()) * _GROUP


class Storm:
    """A dock, its workers, and whoever kills them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._rng = random.Random(seed)
        self._secret = secrets.token_hex(16)
        self._address = f"unix:{folder / 'storm'}"
        self._run_id = f"bench-storm-{secrets.token_hex(4)}"
        self._log = folder / "storm.log"
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self._count = 0
        self._dock = self._launch(self._run_id, "dock")

    def close(self) -> None:
        """Kill what is left, and remove what the dock held."""
        for process in (*self._workers.values(), self._dock):
            process.kill()
            process.communicate()
        left = left_by(self._run_id, default_root())
        if left is not None:
            shutil.rmtree(left)

    def run(self, seconds: float) -> Outcome:
        """Train batches for so long while workers die, then let what is left finish."""
        client = self._client()
        outcome = Outcome()
        end = time.monotonic() + seconds
        for stage, count in _WORKERS:
            for _ in range(count):
                self._start(stage)
        next_kill = time.monotonic() + 1.0
        try:
            while time.monotonic() < end or client.ledger_counts()["in_flight"]:
                if time.monotonic() < end:
                    self._admit(client, outcome)
                    if time.monotonic() > next_kill:
                        self._strike(client, outcome)
                        next_kill = time.monotonic() + self._rng.uniform(0.1, 0.5)
                self._train(client, outcome)
                assert time.monotonic() < end + 60.0, f"the storm is over, and nothing moves: {client.ledger_counts()}"
            counts = client.ledger_counts()
        finally:
            self.close()
        assert counts["admitted"] == outcome.admitted
        assert counts["trained"] == len(outcome.seen)
        return outcome

    def recover(self, stop: bool) -> float:
        """Seconds from the end of a reader that holds a group (SIGKILL; stop: SIGSTOP) until another one has it."""
        client = self._client()
        client.admit([(0, _GROUP, "train", {"prompt": np.full(3, 0)})])
        holder = self._start("hold")
        assert holder.stdout is not None
        holder.stdout.readline()
        os.kill(holder.pid, signal.SIGSTOP if stop else signal.SIGKILL)
        start = time.monotonic()
        batch = client.take("rollout", max_groups=1, version=0, wait_s=LEASE_S + 10.0)
        seconds = time.monotonic() - start
        self.close()
        assert batch is not None, "the group of a dead reader never came back"
        return seconds

    def _admit(self, client: DockClient, outcome: Outcome) -> None:
        count = client.num_admissible()
        ids = range(outcome.admitted, outcome.admitted + count)
        client.admit([(group_id, _GROUP, "train", {"prompt": np.full(3, group_id)}) for group_id in ids])
        outcome.admitted += count

    def _train(self, client: DockClient, outcome: Outcome) -> None:
        batch = client.take_batch("train", groups=_BATCH, wait_s=0.1)
        if batch is None:
            return
        for sample, response, score in zip(batch.ids, batch["response"], batch["score"], strict=True):
            good = np.array_equal(response, response_of(sample)) and int(score) == int(response.sum())
            outcome.wrong += not good
        client.check([batch.lease])
        outcome.seen.update(client.trained(batch.lease))
        client.advance(client.version + 1)

    def _strike(self, client: DockClient, outcome: Outcome) -> None:
        """Kill a worker or the dock, or stop a worker for good."""
        if self._rng.random() < 0.15:
            self._dock.kill()
            self._dock.communicate()
            start = time.monotonic()
            self._dock = self._launch(self._run_id, "dock")
            client.status()
            outcome.dock_recovery_s.append(time.monotonic() - start)
            return
        name = self._rng.choice(list(self._workers))
        stage = name.split("-")[0]
        if self._rng.random() < 0.2:
            os.kill(self._workers[name].pid, signal.SIGSTOP)
            outcome.stopped += 1
            self._workers[f"{stage}-stopped-{outcome.stopped}"] = self._workers.pop(name)
        else:
            worker = self._workers.pop(name)
            worker.kill()
            worker.wait()
            outcome.killed += 1
        self._start(stage)

    def _client(self) -> DockClient:
        secret = self._secret.encode()
        return DockClient.connect(self._address, secret, "coordinator", wait_s=10.0, reconnect_s=RECONNECT_S)

    def _start(self, stage: str) -> subprocess.Popen[bytes]:
        self._count += 1
        name = f"{stage}-{self._count}"
        self._workers[name] = self._launch(name, stage)
        return self._workers[name]

    def _launch(self, name: str, stage: str) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "tranship.bench.dock_storm", self._address, self._secret, name, stage]
            return subprocess.Popen(
                command, stderr=log, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )


def serve(address: str, secret: str, run_id: str) -> None:
    """A durable dock that goes on where a killed one was, for ever."""

    def make_dock(clock: Callable[[], float], adopt: Path | None) -> Dock:
        return Dock(
            STAGES,
            run_id=run_id,
            batch_groups=_BATCH,
            staleness=1,
            lease_s=LEASE_S,
            slab_bytes=1 << 20,
            capacity_bytes=256 << 20,
            shared=True,
            ordered=False,
            clock=clock,
            adopt=adopt,
        )

    durable = DurableDock(make_dock, left_by(run_id, default_root()))
    DockService(durable, [address], secret=secret.encode()).run()


def work(client: DockClient, stage: str) -> None:
    """Take, write and acknowledge groups for ever."""
    done: list[int] = []
    while True:
        version = client.version if stage == "rollout" else None
        batch = client.take(stage, max_groups=4, version=version, done=done, wait_s=0.5)
        done = []
        if batch is None:
            continue
        try:
            client.put(batch.ids, _columns_of(batch, stage), batch.lease, version)
            done = [batch.lease]
        except StaleLease:
            continue


def _columns_of(batch: Batch, stage: str) -> dict[str, list[np.ndarray]]:
    if stage == "rollout":
        return {"response": [response_of(sample) for sample in batch.ids]}
    return {"score": [np.array(int(response.sum())) for response in batch["response"]]}


def main(address: str, secret: str, name: str, stage: str) -> None:
    """A worker until the dock is gone; "hold": take a group, say so, and do nothing with it; "dock": the dock."""
    if stage == "dock":
        serve(address, secret, name)
    client = DockClient.connect(address, secret.encode(), name, wait_s=10.0, reconnect_s=RECONNECT_S)
    if stage == "hold":
        batch = client.take("rollout", max_groups=1, version=0, wait_s=10.0)
        print("holding" if batch is not None else "nothing", flush=True)
        time.sleep(3600)
    while True:
        try:
            work(client, stage)
        except StaleLease:
            continue
        except ConnectionLost:
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
