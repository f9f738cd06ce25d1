"""One dock, and readers and writers in processes of their own, over every transport and shared memory; also where
stages have controllers in processes of their own.

Run as a program, this file is one of those processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from tranship.dock import Dock, DockClient, StageNeeds, StaleLease
from tranship.dock.frames import ConnectionLost
from tranship.dock.service import DockService
from tranship.dock.stage_controller import StageController
from tranship.dock.stage_dock import stage_number
from tranship.types import SampleId

GROUPS, SIZE = 150, 4
LEASE_S = 60.0
NEVER = 10**9
STAGES = (
    StageNeeds("rollout", ("prompt",)),
    StageNeeds("first", ("response", "digest"), "row"),
    StageNeeds("second", ("prompt", "response", "digest"), "row"),
    StageNeeds("train", ("prompt", "response", "mark_first", "mark_second")),
)
SPREAD = ("first", "second")
SECRET = b"a secret of this test"


# The processes


def response_of(sample: SampleId) -> np.ndarray:
    return np.random.default_rng(sample.group_id * 10 + sample.sample_index).integers(0, 2**31, 200 + sample.group_id)


def digest_of(array: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(array))


def connect(where: str, name: str) -> DockClient:
    """A client. where: the dock's address, and those of the controllers that are not in its process, as JSON."""
    address, controllers = json.loads(where)
    return DockClient.connect(address, SECRET, name, wait_s=20, controllers=controllers)


def control(where: str, stage: str) -> None:
    """A stage's controller, until the dock is gone."""
    home, controllers = json.loads(where)
    needs = next(needs for needs in STAGES if needs.name == stage)
    controller = StageController(
        needs,
        home,
        [controllers[stage]],
        secret=SECRET,
        number=stage_number(stage, SPREAD),
        lease_s=LEASE_S,
        prefetch=40,
    )
    print("ready", flush=True)
    with suppress(ConnectionLost):
        controller.wait()


def produce(client: DockClient, die_after: int) -> None:
    """Take, write and acknowledge groups; with die_after, be killed while holding some, half of them written."""
    done = 0
    while True:
        batch = client.take("rollout", max_groups=5, version=0, wait_s=10.0)
        if batch is None:
            continue
        rows = batch.ids[: SIZE * 2] if done >= die_after else batch.ids
        responses = [response_of(sample) for sample in rows]
        client.put(
            rows, {"response": responses, "digest": [digest_of(response) for response in responses]}, batch.lease, 0
        )
        if done >= die_after:
            os.kill(os.getpid(), signal.SIGKILL)
        client.ack(batch.lease)
        done += len(batch.groups)


def read(client: DockClient, stage: str, seen: list[list[int]]) -> None:
    while True:
        batch = client.take_rows(stage, max_rows=17, wait_s=10.0)
        if batch is None:
            continue
        for sample, response, digest in zip(batch.ids, batch["response"], batch["digest"], strict=True):
            assert digest_of(response) == digest, f"{sample} was changed on its way"
            np.testing.assert_array_equal(response, response_of(sample))
            seen.append([sample.group_id, sample.sample_index])
        with suppress(StaleLease):  # Where the dock is gone, so are the leases that a stage's controller gave.
            client.put(batch.ids, {f"mark_{stage}": [client._owner] * len(batch.ids)}, batch.lease)
            client.ack(batch.lease)


def main(where: str, name: str, role: str, die_after: str) -> None:
    if role == "controller":
        control(where, name)
        return
    client = connect(where, name)
    seen: list[list[int]] = []
    try:
        if role == "producer":
            produce(client, int(die_after))
        else:
            read(client, role, seen)
    except ConnectionLost:
        print(json.dumps(seen))


# The dock's side


class Server:
    """A dock in this process, served at an address, and controllers in others. where: see connect."""

    def __init__(self, dock: Dock, address: str, controllers: dict[str, str]) -> None:
        self.dock = dock
        self.service = DockService(dock, [address], secret=SECRET).start()
        self.where = json.dumps([self.service.addresses[0], controllers])
        self.processes = [start(self.where, stage, "controller", 0) for stage in controllers]
        for process in self.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"


def start(where: str, name: str, role: str, die_after: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, __file__, where, name, role, str(die_after)],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(params=["unix", "tcp", "controllers"])
def server(request, tmp_path):
    root = tmp_path / "shm"
    root.mkdir()
    dock = Dock(
        STAGES,
        run_id="processes",
        batch_groups=GROUPS,
        staleness=0,
        lease_s=LEASE_S,
        slab_bytes=1 << 16,
        capacity_bytes=1 << 24,
        shared=True,
        ordered=False,
        root=root,
    )
    address = "tcp:127.0.0.1:0" if request.param == "tcp" else f"unix:{tmp_path / 'socket'}"
    controllers = {stage: f"unix:{tmp_path / stage}" for stage in SPREAD} if request.param == "controllers" else {}
    server = Server(dock, address, controllers)
    yield server
    server.service.close()
    for process in server.processes:
        process.communicate(timeout=30)
        assert process.returncode == 0
    dock.close()
    assert list(root.iterdir()) == []


def run_processes(server: Server, processes: list[tuple[str, str, int]]) -> dict[str, Any]:
    """Admit everything, run the processes until the batch is complete; what each reader saw. Trains the batch.

    A process that is to die has died before the next one is started.
    """
    coordinator = connect(server.where, "coordinator")
    for first in range(0, GROUPS, 50):
        prompts = [np.full(3, group_id, np.int32) for group_id in range(first, first + 50)]
        coordinator.admit([(first + i, SIZE, "train", {"prompt": prompt}) for i, prompt in enumerate(prompts)])
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, role, die_after in processes:
            started[name] = start(server.where, name, role, die_after)
            if role == "producer" and die_after < NEVER:
                started[name].wait(60)
        batch = coordinator.take_batch("train", groups=GROUPS, wait_s=90)
        assert batch is not None, f"the batch is not complete after 90 s: {server.dock.ledger}"
        for sample, response, prompt in zip(batch.ids, batch["response"], batch["prompt"], strict=True):
            np.testing.assert_array_equal(response, response_of(sample))
            np.testing.assert_array_equal(prompt, np.full(3, sample.group_id))
        marks = {stage: Counter(batch[f"mark_{stage}"]) for stage in ("first", "second")}
        assert len(coordinator.trained(batch.lease)) == GROUPS
    finally:
        server.service.close()
        outputs = {name: process.communicate(timeout=30)[0] for name, process in started.items()}
    seen = {name: json.loads(output) if output else [] for name, output in outputs.items()}
    return {"seen": seen, "codes": {name: process.returncode for name, process in started.items()}, "marks": marks}


READERS = [("a1", "first", 0), ("a2", "first", 0), ("b1", "second", 0), ("b2", "second", 0)]


def test_each_stage_sees_each_row_once_and_unchanged(server):
    result = run_processes(server, [("p1", "producer", NEVER), ("p2", "producer", NEVER), *READERS])
    every = sorted([group_id, index] for group_id in range(GROUPS) for index in range(SIZE))
    seen = result["seen"]
    assert sorted(seen["a1"] + seen["a2"]) == every
    assert sorted(seen["b1"] + seen["b2"]) == every
    assert set(result["codes"].values()) == {0}
    for stage, names in (("first", ("a1", "a2")), ("second", ("b1", "b2"))):
        assert result["marks"][stage] == Counter({name: len(seen[name]) for name in names if seen[name]})


def test_a_killed_producers_rows_are_made_again(server):
    result = run_processes(server, [("doomed", "producer", 40), ("p2", "producer", NEVER), *READERS])
    assert result["codes"]["doomed"] == -signal.SIGKILL
    assert server.dock.ledger.trained == GROUPS
    every = {(group_id, index) for group_id in range(GROUPS) for index in range(SIZE)}
    for names in (("a1", "a2"), ("b1", "b2")):
        assert {tuple(row) for name in names for row in result["seen"][name]} == every


def test_what_a_resumed_writer_says_after_it_was_given_up_is_refused(server):
    """As after a SIGSTOP: it still maps its slab, and writes into it, and reaches nobody."""
    zombie = connect(server.where, "zombie")
    zombie.admit([(group_id, 1, "train", {"prompt": np.full(3, group_id)}) for group_id in range(GROUPS)])
    batch = zombie.take("rollout", max_groups=1, version=0)
    assert batch is not None
    memory = zombie._writer._memory
    other = connect(server.where, "other")
    other.retire("zombie")
    again = other.take("rollout", max_groups=1, version=0)
    assert again is not None
    assert again.ids == batch.ids
    with pytest.raises(StaleLease):
        zombie.put(batch.ids, {"response": [np.zeros(50)], "digest": [0]}, batch.lease, 0)
    good = np.full(50, 7)
    other.put(again.ids, {"response": [good], "digest": [digest_of(good)]}, again.lease, 0)
    free = zombie._writer._next
    memory[free : free + 4096] = b"\xff" * 4096
    read_back = other.take_rows("first", max_rows=1)
    assert read_back is not None
    np.testing.assert_array_equal(read_back["response"][0], good)
    np.testing.assert_array_equal(other.take("rollout", max_groups=1, version=0)["prompt"][0], np.full(3, 1))


if __name__ == "__main__":
    assert Path(sys.argv[0]).name == "test_dock_processes.py"
    main(*sys.argv[1:])
