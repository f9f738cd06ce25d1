"""What happens to rows when processes are killed or stopped, and when memory runs out: real processes, real signals.

Run as a program, this file is one of those processes.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tranship.dock import Dock, DockClient, DockFull, StageNeeds, StaleLease, StaleSlab
from tranship.dock.buffers import Buffers
from tranship.dock.frames import ConnectionLost
from tranship.dock.place import Place
from tranship.dock.runs import RunServer
from tranship.dock.served import ServedDock
from tranship.dock.service import DockService
from tranship.dock.shared_folder import left_by
from tranship.types import SampleId

SECRET = b"a secret of this test"
LEASE_S = 1.0
STAGES = (
    StageNeeds("rollout", ("prompt",)),
    StageNeeds("read", ("response",)),
    StageNeeds("done", ("response", "read_by")),
)


def response_of(group_id: int, index: int) -> np.ndarray:
    return np.arange(5000 + group_id, dtype=np.int32) * (index + 1)


# The processes


def make_dock(root: str, run_id: str, *, capacity_bytes: int = 1 << 24, **more: Any) -> Dock:
    return Dock(
        STAGES,
        run_id=run_id,
        batch_groups=4,
        staleness=0,
        lease_s=LEASE_S,
        slab_bytes=1 << 20,
        capacity_bytes=capacity_bytes,
        shared=True,
        ordered=False,
        root=Path(root),
        **more,
    )


def host(socket: str, root: str, kind: str) -> None:
    """A dock, its service and its payload's server, until it is killed; a durable one goes on where one was killed."""

    is_durable = kind == "durable"
    served = ServedDock(
        lambda clock, adopt: make_dock(root, "faults", clock=clock, adopt=adopt),
        [f"unix:{socket}"],
        secret=SECRET,
        runs="tcp:127.0.0.1:0",
        durable=is_durable,
        adopt=left_by("faults", Path(root)) if is_durable else None,
    )
    print("ready", flush=True)
    signal.pause()
    served.close()


def hold(address: str) -> None:
    """Take a group, say so, wait to be woken, and then do the work after all."""
    client = DockClient.connect(address, SECRET, "holder", wait_s=5.0)
    batch = client.take("rollout", max_groups=1, kinds=("val",), wait_s=10.0)
    assert batch is not None
    print("holding", flush=True)
    sys.stdin.readline()
    rows = batch.ids
    try:
        client.put(rows, {"response": [response_of(row.group_id, row.sample_index) for row in rows]}, batch.lease)
    except StaleLease:
        print("refused", flush=True)
    else:
        print("accepted", flush=True)


def work(address: str, name: str, stage: str) -> None:
    """Do groups at a stage until the dock is gone for good; its own losses are no reason to stop."""
    client = DockClient.connect(address, SECRET, name, wait_s=20.0, reconnect_s=20.0)
    done: list[int] = []
    while True:
        try:
            batch = client.take(stage, max_groups=2, kinds=("val",), done=done, wait_s=5.0)
            done = []
            if batch is None:
                continue
            if stage == "rollout":
                rows = batch.ids
                values = [response_of(row.group_id, row.sample_index) for row in rows]
                client.put(rows, {"response": values}, batch.lease)
            else:
                for row, value in zip(batch.ids, batch["response"], strict=True):
                    np.testing.assert_array_equal(value, response_of(row.group_id, row.sample_index))
                client.put(batch.ids, {"read_by": [name] * len(batch)}, batch.lease)
            done = [batch.lease]
        except StaleLease:
            done = []


def fill(root: str) -> None:
    """Put until a full file system says so, make room, and go on; in a file system that is smaller than the budget."""
    dock = make_dock(root, "full", capacity_bytes=1 << 30)
    service = DockService(dock, ["tcp:127.0.0.1:0"], secret=SECRET).start()
    client = DockClient.connect(service.addresses[0], SECRET, "writer", wait_s=0.2)
    client.admit([(i, 1, "val", {"prompt": np.zeros(1)}) for i in range(100)])
    put = 0
    try:
        for group_id in range(100):
            client.put([SampleId(group_id, 0)], {"response": [np.full(400_000, group_id, np.uint8)]})
            put += 1
    except DockFull as error:
        print("DockFull", error, flush=True)
    client.finish_val(range(4))
    client.put([SampleId(50, 0)], {"response": [np.full(400_000, 50, np.uint8)]})
    batch = client.take("read", max_groups=100, kinds=("val",))
    assert batch is not None
    for sample, value in zip(batch.ids, batch["response"], strict=True):
        assert value.tolist() == [sample.group_id] * 400_000
    print(f"{put} were put and {len(batch)} read", flush=True)
    service.close()
    dock.close()


NETWORK = """
ip link set lo up && ip link add name va type veth peer name vb && ip link set vb netns $1 &&
ip addr add 10.77.0.1/24 dev va && ip link set va up &&
nsenter -t $1 -n ip link set lo up && nsenter -t $1 -n ip addr add 10.77.0.2/24 dev vb &&
nsenter -t $1 -n ip link set vb up
"""


def two_nodes(root: str) -> None:
    """A dock on this node, and a reader on another: with its own network, and its own shared memory."""
    dock = make_dock(root, "nodes")
    folder = dock.payload_folder()
    assert folder is not None
    own = "mount -t tmpfs tmpfs " + root + " && echo up && sleep 60"
    other = subprocess.Popen(["unshare", "-nm", "sh", "-c", own], stdout=subprocess.PIPE, start_new_session=True)
    assert said(other) == "up"
    subprocess.run(["sh", "-ec", NETWORK, "sh", str(other.pid)], check=True)
    runs = RunServer(folder, "tcp:10.77.0.1:0", secret=SECRET).start()
    place = Place.of_folder(folder, runs.address)
    service = DockService(dock, ["tcp:10.77.0.1:0"], secret=SECRET, place=place).start()
    client = DockClient.connect(service.addresses[0], SECRET, "near", wait_s=5.0)
    admit(client, 1, 2, 3)
    put(client, 1)
    put(client, 2)
    inside = ["nsenter", "-t", str(other.pid), "-n", "-m"]
    reader = start("far", service.addresses[0], folder, before=inside)
    print(said(reader), flush=True)
    subprocess.run(["ip", "link", "set", "va", "down"], check=True)
    start_s = time.monotonic()
    batch = client.take("read", max_groups=1, kinds=("val",), wait_s=LEASE_S + 5.0)
    assert batch is not None
    np.testing.assert_array_equal(batch["response"][1], response_of(3, 1))
    print("within lease + 1 s" if time.monotonic() - start_s <= LEASE_S + 1.0 else "late", flush=True)
    end(reader)
    os.killpg(other.pid, signal.SIGKILL)
    other.communicate()
    service.close()
    runs.close()
    dock.close()


def far(address: str, folder: str) -> None:
    """Put a group over the network, read all, and hold the last one."""
    assert not Path(folder).exists()
    client = DockClient.connect(address, SECRET, "far", wait_s=5.0)
    put(client, 3)
    for _ in range(3):
        batch = client.take("read", max_groups=1, kinds=("val",))
        assert batch is not None
        packed = batch.packed(("response",), Buffers())["response"]
        for place, row in enumerate(batch.ids):
            np.testing.assert_array_equal(packed[place], response_of(row.group_id, row.sample_index))
        if batch.groups[0].group_id < 3:
            client.ack(batch.lease)
    print("read over the network", flush=True)
    time.sleep(60)


# The tests


def start(role: str, *words: str, before: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [*before, sys.executable, __file__, role, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    return process


def said(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def end(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def hosted(tmp_path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    (tmp_path / "shm").mkdir()
    process = start("host", str(tmp_path / "socket"), str(tmp_path / "shm"), "plain")
    assert said(process) == "ready"
    yield f"unix:{tmp_path / 'socket'}", process
    end(process)


def admit(client: DockClient, *group_ids: int) -> None:
    client.admit([(i, 2, "val", {"prompt": np.full(3, i)}) for i in group_ids])


def put(client: DockClient, group_id: int) -> None:
    rows = [SampleId(group_id, index) for index in range(2)]
    client.put(rows, {"response": [response_of(row.group_id, row.sample_index) for row in rows]})


@pytest.mark.parametrize("stopped", [False, True], ids=["SIGKILL", "SIGSTOP"])
def test_what_a_dead_or_stopped_reader_had_goes_to_another_one(hosted, stopped):
    address, _ = hosted
    client = DockClient.connect(address, SECRET, "client", wait_s=5.0)
    admit(client, 1)
    holder = start("hold", address)
    assert said(holder) == "holding"
    os.kill(holder.pid, signal.SIGSTOP if stopped else signal.SIGKILL)
    start_s = time.monotonic()
    batch = client.take("rollout", max_groups=1, kinds=("val",), wait_s=LEASE_S + 5.0)
    took = time.monotonic() - start_s
    assert batch is not None
    assert took <= LEASE_S + 1.0
    if stopped:
        assert holder.stdin is not None
        os.kill(holder.pid, signal.SIGCONT)
        holder.stdin.write(b"\n")
        holder.stdin.flush()
        assert said(holder) == "refused"
    client.put(batch.ids, {"response": [response_of(1, 0), response_of(1, 1)]}, batch.lease)
    client.ack(batch.lease)
    read = client.take("read", max_groups=1, kinds=("val",))
    assert read is not None
    np.testing.assert_array_equal(read["response"][1], response_of(1, 1))
    end(holder)


def test_a_killed_dock_is_named_at_once_and_what_it_left_is_swept(hosted, tmp_path):
    address, process = hosted
    client = DockClient.connect(address, SECRET, "client", wait_s=5.0)
    far = DockClient.connect(address, SECRET, "far", wait_s=5.0, node="elsewhere")
    admit(client, 1)
    put(client, 1)
    batch = far.take("read", max_groups=1, kinds=("val",))
    assert batch is not None
    end(process)
    start_s = time.monotonic()
    with pytest.raises(ConnectionLost, match=f"the dock at {address} is gone"):
        client.status()
    with pytest.raises(ConnectionLost, match="is gone"):
        batch.packed(("response",), Buffers())
    assert time.monotonic() - start_s < 1.0
    left = list((tmp_path / "shm").iterdir())
    assert len(left) == 1
    again = start("host", str(tmp_path / "socket"), str(tmp_path / "shm"), "plain")
    assert said(again) == "ready"
    DockClient.connect(address, SECRET, "client", wait_s=5.0).status()
    assert left[0] not in list((tmp_path / "shm").iterdir())
    end(again)


def test_clients_go_on_with_the_successor_of_a_killed_dock(tmp_path):
    """Leases, slabs and content outlive it; a message that it did not answer is repeated, and done once."""
    (tmp_path / "shm").mkdir()
    words = (str(tmp_path / "socket"), str(tmp_path / "shm"), "durable")
    process = start("host", *words)
    assert said(process) == "ready"
    client = DockClient.connect(f"unix:{tmp_path / 'socket'}", SECRET, "client", wait_s=5.0, reconnect_s=20.0)
    admit(client, 1, 2)
    batch = client.take("rollout", max_groups=1, kinds=("val",))
    assert batch is not None
    for number in range(3):
        end(process)
        process = start("host", *words)
        client.renew(batch.lease)
        if number == 1:
            put(client, 1)
    client.ack(batch.lease)
    with pytest.raises(StaleLease):
        client.ack(batch.lease)
    put(client, 2)
    read = client.take("read", max_groups=2, kinds=("val",))
    assert read is not None
    for row, value in zip(read.ids, read["response"], strict=True):
        np.testing.assert_array_equal(value, response_of(row.group_id, row.sample_index))
    client.ack(read.lease)
    client.finish_val([1, 2])
    counts = client.ledger_counts()
    assert (counts["val_admitted"], counts["val_ended"]) == (2, 2)
    end(process)


def test_nothing_is_lost_when_the_dock_and_its_workers_are_killed_again_and_again(tmp_path):
    (tmp_path / "shm").mkdir()
    address = f"unix:{tmp_path / 'socket'}"
    words = (str(tmp_path / "socket"), str(tmp_path / "shm"), "durable")
    process = start("host", *words)
    assert said(process) == "ready"
    client = DockClient.connect(address, SECRET, "client", wait_s=20.0, reconnect_s=20.0)
    workers = [start("work", address, f"{stage}{i}", stage) for stage in ("rollout", "read") for i in range(2)]
    total, next_id, finished = 80, 0, 0
    kill_at = [20, 50]
    deadline = time.monotonic() + 100
    while finished < total:
        assert time.monotonic() < deadline, f"the run stands still: {client.ledger_counts()}"
        if next_id < total and next_id < finished + 20:
            admit(client, *range(next_id, next_id + 10))
            next_id += 10
        batch = client.take("done", max_groups=10, kinds=("val",), wait_s=0.2)
        if batch is not None:
            assert set(batch["read_by"]) <= {"read0", "read1", "read2"}
            ids = [group.group_id for group in batch.groups]
            client.ack(batch.lease)
            client.finish_val(ids)
            finished += len(ids)
        if kill_at and finished >= kill_at[0]:
            kill_at.pop(0)
            end(process, workers[0])
            process = start("host", *words)
            workers = [*workers[1:], start("work", address, f"read{2 - len(kill_at)}x", "rollout")]
    counts = client.ledger_counts()
    assert (counts["val_admitted"], counts["val_ended"]) == (total, total)
    end(process, *workers)


def test_a_reader_on_another_node_reads_the_same_and_late_ones_get_an_error(hosted):
    address, _ = hosted
    near = DockClient.connect(address, SECRET, "near", wait_s=5.0)
    far = DockClient.connect(address, SECRET, "far", wait_s=5.0, node="elsewhere")
    buffers = Buffers()
    for group_id in range(8):
        admit(near, group_id)
        put(near, group_id)
        batch = far.take("read", max_groups=1, kinds=("val",))
        assert batch is not None
        packed = batch.packed(("response",), buffers)["response"]
        for index in range(2):
            np.testing.assert_array_equal(packed[index], response_of(group_id, index))
            np.testing.assert_array_equal(batch["response"][index], response_of(group_id, index))
        far.ack(batch.lease)
    admit(near, 100)
    put(near, 100)
    late = far.take("read", max_groups=1, kinds=("val",))
    assert late is not None
    time.sleep(LEASE_S + 0.1)
    near.finish_val([*range(8), 100])
    big = 300_000
    for group_id in range(101, 107):
        admit(near, group_id)
        near.put([SampleId(group_id, 0)], {"response": [np.zeros(big, np.int32)]})
        near.finish_val([group_id])
    with pytest.raises(StaleSlab):
        late.packed(("response",), Buffers())


def test_a_reader_on_another_node_fetches_and_when_it_is_cut_off_another_one_goes_on(tmp_path):
    """Network namespaces, each with its own shared memory, are the nodes; the link between them is cut."""
    if any(shutil.which(program) is None for program in ("unshare", "nsenter", "ip")):
        pytest.skip("unshare, nsenter and ip are not all installed: the test cannot make nodes")
    probe = subprocess.run(
        ["unshare", "-Urnm", "ip", "link", "add", "name", "va", "type", "veth", "peer", "name", "vb"],
        capture_output=True,
    )
    if probe.returncode:
        pytest.skip("this system does not let a test make networks of its own")
    done = subprocess.run(
        ["unshare", "-Urnm", sys.executable, __file__, "two_nodes", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == ["read over the network", "within lease + 1 s"], done.stderr


def test_a_full_shared_memory_file_system_is_named_and_survived(tmp_path, run_on_small_tmpfs):
    done = run_on_small_tmpfs(tmp_path, 6, [sys.executable, __file__, "fill", tmp_path])
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("DockFull writer waited")
    assert "has no room for" in first
    put, read = (int(word) for word in second.split() if word.isdigit())
    assert put >= 8
    assert read == put - 4 + 1


if __name__ == "__main__":
    roles = {"host": host, "hold": hold, "work": work, "fill": fill, "two_nodes": two_nodes, "far": far}
    roles[sys.argv[1]](*sys.argv[2:])
