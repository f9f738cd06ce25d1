"""A dock whose rows lie on several nodes: emulated as groups of processes, each with a warehouse of its own, that are
killed or held. What one node needs from another goes over TCP.

Run as a program, this file is one of those processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from tranship.dock import Dock, DockClient, Keeper, ServedDock, StageNeeds, StaleLease, StaleSlab, durable
from tranship.dock.buffers import Buffers
from tranship.dock.frames import ConnectionLost
from tranship.types import SampleId

SECRET = b"a secret of this test"
LEASE_S = 1.5
SIZE = 3
HERE, THERE = "node-a", "node-b"
STAGES = (
    StageNeeds("rollout", ("prompt",)),
    StageNeeds("reward", ("prompt", "response")),
    StageNeeds("train", ("prompt", "response", "reward")),
)


def response_of(sample: SampleId) -> np.ndarray:
    return np.arange(2000 + sample.sample_index, dtype=np.int32) + 7 * sample.group_id


# The processes


def produce(address: str, name: str, node: str) -> None:
    """Sample every group that can be had, for ever; say on a line of its own which one is done."""
    client = DockClient.connect(address, SECRET, name, wait_s=20, node=node, reconnect_s=20)
    while True:
        batch = client.take("rollout", max_groups=1, wait_s=10)
        if batch is None:
            continue
        with suppress(StaleLease):
            client.put(batch.ids, {"response": [response_of(row) for row in batch.ids]}, batch.lease, batch.version)
            client.ack(batch.lease)
            print(batch.groups[0].group_id, flush=True)


def keep(address: str, root: str, adopt: str) -> None:
    keeper = Keeper(
        address,
        SECRET,
        THERE,
        run_id="there",
        lease_s=LEASE_S,
        root=Path(root),
        adopt=Path(adopt) if adopt else None,
        reconnect_s=20,
    )
    print(keeper.folder, flush=True)
    signal.pause()


@contextmanager
def process(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process that prints lines; it ends with the context, however it is."""
    command = [sys.executable, __file__, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            with suppress(ProcessLookupError):
                started.send_signal(signal.SIGCONT)
                started.kill()


def line_of(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    return started.stdout.readline().strip()


# The dock, and what is done on its own node


class Rig:
    """A dock on node a. client: the coordinator's; reader: another one's on the same node."""

    def __init__(
        self,
        root: Path,
        *,
        groups: int = 4,
        capacity_bytes: int = 1 << 22,
        lease_s: float = LEASE_S,
        **more: object,
    ) -> None:
        self.root = root
        self.groups = groups

        def make(clock: Callable[[], float], adopt: Path | None) -> Dock:
            return Dock(
                STAGES,
                run_id="here",
                batch_groups=groups,
                staleness=0,
                lease_s=lease_s,
                slab_bytes=1 << 16,
                capacity_bytes=capacity_bytes,
                shared=True,
                ordered=False,
                root=root,
                clock=clock,
                adopt=adopt,
            )

        addresses = ["unix:", "tcp:127.0.0.1:0"]
        options = {"secret": SECRET, "runs": "tcp:127.0.0.1:0", "node": HERE, **more}
        self.served = ServedDock(make, addresses, **options)  # type: ignore[arg-type]
        self.address = self.served.access.address(THERE)
        self.client = self.connect("coordinator")
        self.reader = self.connect("reader")

    def connect(self, name: str, node: str = HERE) -> DockClient:
        return DockClient.connect(self.served.access.address(node), SECRET, name, wait_s=10, node=node)

    def admit(self, first: int = 0) -> None:
        ids = range(first, first + self.groups)
        self.client.admit([(i, SIZE, "train", {"prompt": np.full(4, i, np.int32)}) for i in ids])

    def produce(self, client: DockClient, groups: int = 1) -> None:
        """What a sampler does, in this process."""
        for _ in range(groups):
            batch = client.take("rollout", max_groups=1, wait_s=10)
            assert batch is not None
            client.put(batch.ids, {"response": [response_of(row) for row in batch.ids]}, batch.lease, batch.version)
            client.ack(batch.lease)

    def reward(self, groups: int) -> None:
        """Read and score so many groups, on the dock's node."""
        buffers = Buffers()
        while groups:
            batch = self.reader.take("reward", max_groups=groups, wait_s=10)
            assert batch is not None
            try:
                packed = batch.packed(["response"], buffers)["response"]
            except StaleLease:
                continue
            wanted = np.concatenate([response_of(sample) for sample in batch.ids])
            np.testing.assert_array_equal(packed.values, wanted)
            self.reader.put(batch.ids, {"reward": [1.0] * len(batch.ids)}, batch.lease)
            self.reader.ack(batch.lease)
            groups -= len(batch.groups)

    def train(self) -> list[int]:
        batch = self.reader.take_batch("train", groups=self.groups, wait_s=10)
        assert batch is not None
        for sample, value in zip(batch.ids, batch["response"], strict=True):
            np.testing.assert_array_equal(value, response_of(sample))
        self.reader.check([batch.lease])
        trained = self.reader.trained(batch.lease)
        self.client.advance(self.client.version + 1)
        return trained

    def folders(self) -> list[str]:
        return sorted(path.name.rpartition("-")[0] for path in self.root.iterdir())

    def close(self) -> None:
        self.served.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.close()


def held_bytes(client: DockClient, node: int) -> int:
    return client._call("memory_use", node).held_bytes


def keeper_of(rig: Rig, lease_s: float = LEASE_S) -> Keeper:
    return Keeper(rig.address, SECRET, THERE, run_id="there", lease_s=lease_s, root=rig.root)


def test_a_writer_puts_into_its_own_nodes_warehouse_and_others_read_from_there(rig: Rig) -> None:
    keeper = keeper_of(rig)
    there = rig.connect("sampler", THERE)
    rig.admit()
    rig.produce(there, 2)
    rig.produce(rig.client, 2)
    assert held_bytes(rig.client, 1) > 0
    assert len(list(keeper.folder.glob("*.slab"))) == 1
    home = held_bytes(rig.client, 0)
    rig.reward(4)
    assert rig.train() == [0, 1, 2, 3]
    # The next batch is written into the same memory.
    rig.admit(4)
    rig.produce(there, 4)
    assert held_bytes(rig.client, 0) == home + (1 << 16), "what the reader wrote is at home"
    rig.reward(4)
    rig.train()
    assert len(list(keeper.folder.glob("*.slab"))) <= 3
    keeper.close()
    assert rig.folders() == ["tranship-here"], "a keeper that ends leaves nothing"


def test_a_value_is_read_without_a_copy_on_its_node_and_comes_over_a_socket_elsewhere(rig: Rig) -> None:
    keeper = keeper_of(rig)
    there, other = rig.connect("sampler", THERE), rig.connect("scorer", THERE)
    rig.admit()
    rig.produce(there, 4)
    near, far = other.take("reward", max_groups=2), rig.reader.take("reward", max_groups=2)
    assert near is not None
    assert far is not None
    assert not near["response"][0].flags.owndata
    assert sum(len(piece.values) for piece in near.views("response")) == sum(map(len, near["response"]))
    for batch in (near, far):
        for sample, value in zip(batch.ids, batch["response"], strict=True):
            np.testing.assert_array_equal(value, response_of(sample))
    keeper.close()


def test_a_process_on_a_node_without_a_warehouse_writes_to_the_docks(rig: Rig) -> None:
    there = rig.connect("sampler", "node-c")
    rig.admit()
    rig.produce(there, 4)
    rig.reward(4)
    assert rig.train() == [0, 1, 2, 3]
    assert rig.folders() == ["tranship-here"]


def test_a_node_has_a_budget_of_its_own_and_a_put_beyond_it_waits_and_is_refused(tmp_path: Path) -> None:
    rig = Rig(tmp_path, capacity_bytes=2 << 16)
    keeper = keeper_of(rig)
    there = rig.connect("sampler", THERE)
    rig.admit()
    rows = there.take("rollout", max_groups=4)
    assert rows is not None
    big = {"response": [np.zeros(10000, np.int32)] * SIZE}
    first, second = rows.ids[:SIZE], rows.ids[SIZE : 2 * SIZE]
    for some in (first, second):
        with pytest.raises(Exception, match=r"dock\.capacity_bytes is 131072"):
            there.put(some, {"response": [np.zeros(20000, np.int32)] * SIZE}, rows.lease, 0)
    there.put(first, big, rows.lease, 0)
    there._wait_s = there._writer._wait_s = 0.5
    with pytest.raises(Exception, match=r"waited \d\.\d s for room .* on node node-b"):
        there.put(second, big, rows.lease, 0)
    keeper.close()
    rig.close()


def test_a_killed_warehouse_has_a_successor_that_serves_what_it_left(tmp_path: Path) -> None:
    # Long enough for another process to start.
    rig = Rig(tmp_path, lease_s=60)
    rig.admit()
    with process("keep", rig.address, rig.root, "") as first:
        folder = line_of(first)
        there = rig.connect("sampler", THERE)
        rig.produce(there, 4)
        rig.reward(2)
        first.kill()
        first.wait()
        with process("keep", rig.address, rig.root, folder) as second:
            assert line_of(second) == folder
            rig.reward(2)
            assert rig.train() == [0, 1, 2, 3]
            rig.admit(4)
            rig.produce(there, 4)
            rig.reward(4)
            assert rig.train() == [4, 5, 6, 7]
    counts = rig.client.ledger_counts()
    assert (counts["trained"], counts["in_flight"], counts["dropped"]) == (8, 0, {})
    rig.close()


@pytest.mark.parametrize("stage", ["sampled", "on lease", "scored", "in a batch"])
def test_the_rows_of_a_killed_node_go_back_to_the_stage_that_made_them(rig: Rig, stage: str) -> None:
    rig.admit()
    with process("keep", rig.address, rig.root, "") as keeper:
        line_of(keeper)
        with process("produce", rig.address, "far-sampler", THERE) as producer:
            assert sorted(int(line_of(producer)) for _ in range(4)) == [0, 1, 2, 3]
            held = None
            if stage in ("scored", "in a batch"):
                rig.reward(4)
            if stage == "on lease":
                held = rig.reader.take("reward", max_groups=2)
            elif stage == "in a batch":
                held = rig.reader.take_batch("train", groups=4)
            keeper.kill()
            producer.kill()
            killed = time.monotonic()
    if stage == "in a batch":
        # Whoever has the batch cannot read it, and gives it back by that.
        assert held is not None
        with pytest.raises(StaleSlab):
            held["response"]
    again = rig.client.take("rollout", max_groups=4, wait_s=10)
    assert again is not None
    assert time.monotonic() - killed < LEASE_S + 1
    assert {view.attempt for view in again.groups} == {0}, "what is done again after a fault keeps its number"
    if held is not None:
        with pytest.raises(StaleLease):
            rig.reader.renew(held.lease)
    rig.client.release(again.lease)
    rig.produce(rig.client, 4)
    rig.reward(4)
    assert sorted(rig.train()) == [0, 1, 2, 3]
    counts = rig.client.ledger_counts()
    assert (counts["admitted"], counts["trained"], counts["in_flight"], counts["dropped"]) == (4, 4, 0, {})


def test_a_warehouse_that_was_held_for_longer_than_a_lease_begins_anew(rig: Rig) -> None:
    rig.admit()
    with process("keep", rig.address, rig.root, "") as keeper:
        old = Path(line_of(keeper))
        there = rig.connect("sampler", THERE)
        rig.produce(there, 4)
        keeper.send_signal(signal.SIGSTOP)
        again = rig.client.take("rollout", max_groups=4, wait_s=LEASE_S + 1)
        assert again is not None, "the node counts as lost"
        rig.client.release(again.lease)
        keeper.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + 10
        while not rig.client._call("places") and time.monotonic() < deadline:
            time.sleep(0.02)
        assert [place.node for place in rig.client._call("places")] == [2]
        assert not list(old.glob("*.slab"))
        rig.produce(there, 4)
        assert held_bytes(rig.client, 2) > 0, "its own node's warehouse again"
        rig.reward(4)
        assert sorted(rig.train()) == [0, 1, 2, 3]


def test_a_keeper_that_waits_hears_at_once_of_what_it_has_to_make(tmp_path: Path) -> None:
    rig = Rig(tmp_path, lease_s=600)
    keeper = keeper_of(rig, lease_s=600)
    there = rig.connect("sampler", THERE)
    rig.admit()
    start = time.monotonic()
    rig.produce(there, 4)
    assert time.monotonic() - start < 5, "its own look comes after 15 s"
    keeper.close()
    rig.close()


def test_a_full_file_system_of_a_node_is_named_and_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pace_s = 0.3
    tried = threading.Semaphore(0)

    def full(descriptor: int, offset: int, nbytes: int) -> None:
        tried.release()
        raise OSError(28, "No space left on device")

    rig = Rig(tmp_path, lease_s=60)
    keeper = keeper_of(rig, lease_s=3 * pace_s)
    there = rig.connect("sampler", THERE)
    rig.admit()
    batch = there.take("rollout", max_groups=1)
    assert batch is not None
    rows = {"response": [response_of(sample) for sample in batch.ids]}
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        there._writer._wait_s = 2.0
        with pytest.raises(Exception, match=r"on node node-b has no room for 65536 bytes more \(No space left"):
            there.put(batch.ids, rows, batch.lease, 0)
        tries = sum(tried.acquire(blocking=False) for _ in range(1000))
        assert tries < 3 + 2.0 / pace_s, "once at the put, and then at the keeper's pace"
        there._writer._wait_s = 30.0
        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(there.put, batch.ids, rows, batch.lease, 0)
            assert tried.acquire(timeout=30)
            assert not later.done()
            patch.undo()
            later.result(30)
    keeper.close()
    rig.close()


@pytest.mark.parametrize("compact_bytes", [1, 1 << 20], ids=["from a base", "from the start"])
def test_a_dock_that_was_killed_goes_on_with_the_rows_of_other_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compact_bytes: int
) -> None:
    monkeypatch.setattr(durable, "_COMPACT_BYTES", compact_bytes)
    rig = Rig(tmp_path, durable=True)
    access = rig.served.access
    rig.admit()
    keeper = Keeper(rig.address, SECRET, THERE, run_id="there", lease_s=LEASE_S, root=rig.root, reconnect_s=20)
    there = DockClient.connect(rig.address, SECRET, "sampler", wait_s=10, node=THERE, reconnect_s=20)
    rig.produce(there, 2)
    # The dock's process is gone: its service ends, and nothing is tidied up.
    rig.served._service.close()
    rig.served._runs.close()  # type: ignore[union-attr]
    folder = rig.served._durable.dock.warehouse.home._folder
    assert folder is not None
    assert access.folder is not None
    os.close(folder._lock)
    rig.served._durable.close()
    again = Rig.__new__(Rig)
    again.root, again.groups = rig.root, rig.groups
    make = rig.served._make_dock
    again.served = ServedDock(
        make,
        access.addresses,
        secret=SECRET,
        runs="tcp:127.0.0.1:0",
        node=HERE,
        durable=True,
        adopt=Path(access.folder),
    )
    again.address = rig.address
    again.client, again.reader = again.connect("coordinator"), again.connect("reader")
    again.produce(there, 2)
    again.reward(4)
    assert again.train() == [0, 1, 2, 3]
    keeper.close()
    again.close()


def main() -> None:
    what, *arguments = sys.argv[1:]
    with suppress(ConnectionLost, KeyboardInterrupt):
        {"keep": keep, "produce": produce}[what](*arguments)


if __name__ == "__main__":
    main()
