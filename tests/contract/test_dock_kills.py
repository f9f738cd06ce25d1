"""Readers that are stopped within a copy, nodes that vanish, journals that are torn, and kills at random moments.

Run as a program (python -m tests.contract.test_dock_kills ROLE ...), this file is one of the processes.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.contract.test_dock_faults import LEASE_S, SECRET, admit, end, hold, host, put, response_of, said, work
from tranship.dock import Batch, DockClient, DockFull, StaleLease, StaleSlab, block, durable, remote
from tranship.dock.buffers import Buffers
from tranship.dock.journal import Journal, _encode
from tranship.dock.shared_folder import left_by
from tranship.types import SampleId

BIG = 10 << 20
_started: list[subprocess.Popen[bytes]] = []


# The processes


def host_compacting(*words: str) -> None:
    """A durable dock whose journal starts again every few messages."""
    durable._COMPACT_BYTES = 1 << 13
    durable._COMPACT_GROWTH = 1
    host(*words)


def late(address: str, node: str) -> None:
    """Copy a group's responses, and be stopped when half of the bytes are here."""
    client = DockClient.connect(address, SECRET, "late", wait_s=5.0, node=node or None)
    batch = client.take("read", max_groups=1, kinds=("val",), wait_s=10.0)
    assert batch is not None
    copyto, receive_into = np.copyto, remote.receive_into

    def copy_halves(out, source, **more):
        half = len(out) // 2
        copyto(out[:half], source[:half])
        os.kill(os.getpid(), signal.SIGSTOP)
        copyto(out[half:], source[half:])

    def receive_halves(stream, out):
        if len(out) < BIG // 2:
            return receive_into(stream, out)
        receive_into(stream, out[: len(out) // 2])
        os.kill(os.getpid(), signal.SIGSTOP)
        return receive_into(stream, out[len(out) // 2 :])

    np.copyto, remote.receive_into = copy_halves, receive_halves
    buffers = Buffers()
    try:
        got = batch.packed(("response",), buffers)["response"]
        print("read", np.unique(got.values).tolist(), flush=True)
    except StaleSlab:
        kept = buffers.take("response", np.dtype(np.uint8), BIG)
        print("refused", np.unique(kept).tolist(), flush=True)
    np.copyto, remote.receive_into = copyto, receive_into
    read_again(batch)


def late_text(address: str, node: str) -> None:
    """Read a group's texts, and be stopped between the look at where one lies and the look at what it is."""
    client = DockClient.connect(address, SECRET, "late", wait_s=5.0, node=node or None)
    batch = client.take("read", max_groups=1, kinds=("val",), wait_s=10.0)
    assert batch is not None
    unpack_value = block.unpack_value

    def unpack_late(data):
        os.kill(os.getpid(), signal.SIGSTOP)
        block.unpack_value = unpack_value
        found = unpack_value(data)
        print("found", found[:1], flush=True)
        return found

    block.unpack_value = unpack_late
    read_again(batch)


def read_again(batch: Batch) -> None:
    for read in (lambda: batch.packed(("response",), Buffers()), lambda: batch["response"]):
        try:
            read()
            print("read", flush=True)
        except (StaleSlab, ValueError) as error:
            print("refused" if isinstance(error, StaleSlab) else "no arrays", flush=True)


def keep(address: str) -> None:
    """Take whatever there is, again and again, never acknowledge, and be alive all the time."""
    client = DockClient.connect(address, SECRET, "keeper", wait_s=20.0, reconnect_s=20.0)
    print("keeps", flush=True)
    while True:
        client.take("rollout", max_groups=1, kinds=("val",), wait_s=5.0)
        client.status()


def node(address: str) -> None:
    """Three clients of one node, in two processes: two hold what they are to do, one reads over the network."""
    child = start("hold", address)
    assert said(child) == "holding"
    near = DockClient.connect(address, SECRET, "node/holder", wait_s=5.0)
    far = DockClient.connect(address, SECRET, "node/reader", wait_s=5.0, node="elsewhere")
    held = near.take("rollout", max_groups=1, kinds=("val",), wait_s=5.0)
    read = far.take("read", max_groups=1, kinds=("val",), wait_s=5.0)
    assert held is not None
    assert read is not None
    read.packed(("response",), Buffers())
    print("holding", flush=True)
    time.sleep(60)


def fill_durably(root: str, socket: str) -> None:
    """In a file system smaller than the budget: fill it with payload, then with the journal; go on after a kill."""
    words = ("host", socket, root, "durable")
    dock = start(*words)
    assert said(dock) == "ready"
    client = DockClient.connect(f"unix:{socket}", SECRET, "writer", wait_s=0.2, reconnect_s=20.0)
    client.admit([(i, 1, "val", {"prompt": np.zeros(1)}) for i in range(100)])
    whole = []
    try:
        for group_id in range(100):
            client.put([SampleId(group_id, 0)], {"response": [np.full(400_000, group_id, np.uint8)]})
            whole.append(group_id)
    except DockFull as error:
        print(error, flush=True)
    try:
        for _ in range(100):
            client.finish_val(range(1000, 1000 + 50_000))
    except DockFull as error:
        print(error, flush=True)
    client.finish_val(whole[:4])
    client.put([SampleId(50, 0)], {"response": [np.full(400_000, 50, np.uint8)]})
    end(dock)
    dock = start(*words)
    batch = client.take("read", max_groups=100, kinds=("val",))
    assert batch is not None
    assert [group.group_id for group in batch.groups] == [*whole[4:], 50]
    for sample, value in zip(batch.ids, batch["response"], strict=True):
        assert value.tolist() == [sample.group_id] * 400_000
    counts = client.ledger_counts()
    print(len(whole), counts["val_admitted"], counts["val_ended"], flush=True)
    end(dock)


# The tests


def start(role: str, *words: str, alone: bool = False) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.contract.test_dock_kills", role, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=alone,
    )
    _started.append(process)
    return process


@pytest.fixture(autouse=True)
def _end_all() -> Iterator[None]:
    """Whatever a test started ends with it, stopped or not."""
    yield
    end(*_started)
    _started.clear()


@pytest.fixture
def words(tmp_path) -> tuple[str, str, str]:
    """What a host is told."""
    (tmp_path / "shm").mkdir()
    return str(tmp_path / "socket"), str(tmp_path / "shm"), "durable"


@pytest.fixture
def address(words) -> str:
    """A durable dock that starts its journal again all the time."""
    process = start("host_compacting", *words)
    assert said(process) == "ready"
    return f"unix:{words[0]}"


def until_stopped(process: subprocess.Popen[bytes]) -> None:
    """Wait for a child that stops itself."""
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), status


@pytest.mark.parametrize("node", ["", "elsewhere"], ids=["on the node", "on another node"])
def test_a_reader_that_is_stopped_within_a_copy_gets_an_error_and_never_another_rows_bytes(address, node):
    client = DockClient.connect(address, SECRET, "client", wait_s=5.0)
    client.admit([(i, 1, "val", {"prompt": np.zeros(1)}) for i in (1, 2)])
    client.put([SampleId(1, 0)], {"response": [np.full(BIG, 1, np.uint8)]})
    slab = client._writer._lease.slab
    reader = start("late", address, node)
    until_stopped(reader)
    take_over(client)
    client.put([SampleId(2, 0)], {"response": [np.full(BIG, 2, np.uint8)]})
    assert client._writer._lease.slab == slab
    os.kill(reader.pid, signal.SIGCONT)
    assert said(reader) == "refused [1, 2]"
    assert said(reader) == "refused"
    assert said(reader) == "refused"


def test_a_text_that_was_looked_at_too_late_is_an_error_and_never_another_rows_text(address):
    client = DockClient.connect(address, SECRET, "client", wait_s=5.0)
    client.admit([(i, 1, "val", {"prompt": np.zeros(1)}) for i in (1, 2)])
    client.put([SampleId(1, 0)], {"response": ["1" * BIG]})
    reader = start("late_text", address, "")
    assert said(reader) == "no arrays"
    until_stopped(reader)
    take_over(client)
    client.put([SampleId(2, 0)], {"response": ["2" * BIG]})
    os.kill(reader.pid, signal.SIGCONT)
    assert said(reader) == "found 2"
    assert said(reader) == "refused"


def take_over(client: DockClient) -> None:
    """Do what a late reader of group 1 had, and end the group: its slab holds nothing then."""
    again = client.take("read", max_groups=1, kinds=("val",), wait_s=LEASE_S + 5.0)
    assert again is not None
    client.ack(again.lease)
    client.finish_val([1])


def test_a_reader_that_never_acknowledges_keeps_nobody_from_the_work(address):
    client = DockClient.connect(address, SECRET, "client", wait_s=5.0)
    keeper = start("keep", address)
    assert said(keeper) == "keeps"
    admit(client, *range(6))
    done: list[int] = []
    start_s = time.monotonic()
    while len(done) < 6:
        batch = client.take("rollout", max_groups=1, kinds=("val",), wait_s=LEASE_S + 1.0)
        assert batch is not None, f"nothing for {LEASE_S + 1.0} s, after {done}"
        try:
            client.put(batch.ids, {"response": [response_of(row.group_id, 0) for row in batch.ids]}, batch.lease)
            client.ack(batch.lease)
        except StaleLease:
            continue
        done.append(batch.groups[0].group_id)
    assert sorted(done) == list(range(6))
    assert time.monotonic() - start_s < 20.0


def test_what_a_node_had_when_all_of_it_is_killed_goes_to_others(address):
    client = DockClient.connect(address, SECRET, "client", wait_s=5.0)
    admit(client, 3)
    batch = client.take("rollout", max_groups=1, kinds=("val",))
    assert batch is not None
    put(client, 3)
    client.ack(batch.lease)
    admit(client, 1, 2)
    gone = start("node", address, alone=True)
    assert said(gone) == "holding"
    os.killpg(gone.pid, signal.SIGKILL)
    start_s = time.monotonic()
    got: dict[str, list[int]] = {"rollout": [], "read": []}
    for stage, count in (("rollout", 2), ("read", 1)):
        while len(got[stage]) < count:
            batch = client.take(stage, max_groups=3, kinds=("val",), wait_s=LEASE_S + 1.0)
            assert batch is not None
            got[stage] += [group.group_id for group in batch.groups]
    assert time.monotonic() - start_s < LEASE_S + 1.0
    assert {stage: sorted(ids) for stage, ids in got.items()} == {"rollout": [1, 2], "read": [3]}


def test_a_dock_that_is_stopped_for_longer_than_a_lease_loses_and_repeats_nothing(words):
    process = start("host_compacting", *words)
    assert said(process) == "ready"
    clients = [DockClient.connect(f"unix:{words[0]}", SECRET, name, wait_s=5.0) for name in ("one", "two")]
    admit(clients[0], 1, 2)
    batches = [client.take("rollout", max_groups=1, kinds=("val",)) for client in clients]
    os.kill(process.pid, signal.SIGSTOP)
    done: Counter[int] = Counter()

    def finish(client, batch):
        while True:
            try:
                group_id = batch.groups[0].group_id
                client.put(batch.ids, {"response": [response_of(group_id, index) for index in (0, 1)]}, batch.lease)
                client.ack(batch.lease)
            except StaleLease:
                batch = client.take("rollout", max_groups=1, kinds=("val",), wait_s=0.5)
                if batch is None:
                    return
            else:
                done[group_id] += 1
                return

    threads = [threading.Thread(target=finish, args=pair) for pair in zip(clients, batches, strict=True)]
    for thread in threads:
        thread.start()
    time.sleep(1.5 * LEASE_S)
    os.kill(process.pid, signal.SIGCONT)
    start_s = time.monotonic()
    for thread in threads:
        thread.join(20)
    assert time.monotonic() - start_s < LEASE_S + 1.0
    assert done == {1: 1, 2: 1}
    assert clients[0].take("rollout", max_groups=2, kinds=("val",)) is None
    read = clients[0].take("read", max_groups=2, kinds=("val",))
    assert read is not None
    for sample, response in zip(read.ids, read["response"], strict=True):
        np.testing.assert_array_equal(response, response_of(sample.group_id, sample.sample_index))


def test_a_message_whose_entry_was_torn_by_the_kill_is_done_once(words):
    """The dock is killed with a message unanswered, of whose entry the journal holds a part."""
    draw = random.Random(0)
    process = start("host_compacting", *words)
    assert said(process) == "ready"
    client = DockClient.connect(f"unix:{words[0]}", SECRET, "client", wait_s=5.0, reconnect_s=20.0)
    admit(client, *range(40))
    for group_id in range(3):
        os.kill(process.pid, signal.SIGSTOP)
        sender = threading.Thread(target=put, args=(client, group_id))
        sender.start()
        time.sleep(0.1)
        end(process)
        folder = left_by("faults", Path(words[1]))
        assert folder is not None
        journal = Journal(folder / "journal")
        list(journal.entries())
        entry = _encode(("m", time.monotonic(), "client", 5, draw.randbytes(500)))
        os.pwrite(journal._file, entry[: draw.randrange(len(entry))], journal.nbytes)
        journal.close()
        process = start("host_compacting", *words)
        sender.join(30)
        assert not sender.is_alive()
    read = client.take("read", max_groups=10, kinds=("val",))
    assert read is not None
    assert [group.group_id for group in read.groups] == [0, 1, 2]
    for row, value in zip(read.ids, read["response"], strict=True):
        np.testing.assert_array_equal(value, response_of(row.group_id, row.sample_index))
    client.finish_val(range(40))
    counts = client.ledger_counts()
    assert (counts["val_admitted"], counts["val_ended"]) == (40, 40)


def test_a_durable_dock_on_a_full_file_system_names_it_and_goes_on_also_after_a_kill(tmp_path, run_on_small_tmpfs):
    (tmp_path / "shm").mkdir()
    program = [sys.executable, "-m", "tests.contract.test_dock_kills", "fill_durably"]
    done = run_on_small_tmpfs(tmp_path / "shm", 8, [*program, tmp_path / "shm", tmp_path / "socket"])
    assert done.returncode == 0, done.stderr
    payload, journal, counts = done.stdout.splitlines()
    assert "has no room for" in payload
    assert journal.startswith("the dock's journal cannot be written")
    whole, admitted, ended = (int(word) for word in counts.split())
    assert whole >= 8
    assert (admitted, ended) == (100, 4)


ROLES = {
    "host_compacting": host_compacting,
    "host": host,
    "hold": hold,
    "work": work,
    "late": late,
    "late_text": late_text,
    "keep": keep,
    "node": node,
    "fill_durably": fill_durably,
}


@pytest.mark.parametrize("seed", range(2))
def test_whatever_is_killed_or_stopped_in_any_order_each_row_counts_once(words, seed):
    """Several workers at each stage and the dock are killed, stopped and replaced at random, as the seed says, while
    groups go through. The whole takes some seconds."""
    draw = random.Random(seed)
    address, total = f"unix:{words[0]}", 30
    dock = start("host_compacting", *words)
    assert said(dock) == "ready"
    client = DockClient.connect(address, SECRET, "client", wait_s=20.0, reconnect_s=20.0)
    names = iter(range(1000))
    stages = ["rollout", "rollout", "read"]
    workers = [start("work", address, f"worker{next(names)}", stage) for stage in stages]
    stopped: list[tuple[float, subprocess.Popen[bytes]]] = []
    faults = ["worker", "worker", "stop", "stop", "dock", "dock"]
    draw.shuffle(faults)
    seen: Counter[int] = Counter()
    next_id, next_fault = 0, time.monotonic()
    deadline = time.monotonic() + 60.0
    while sum(seen.values()) < total or faults:
        assert time.monotonic() < deadline, f"the run stands still: {client.ledger_counts()}, {faults} to come"
        if next_id < total and next_id < len(seen) + 15:
            admit(client, *range(next_id, next_id + 5))
            next_id += 5
        batch = client.take("done", max_groups=10, kinds=("val",), wait_s=0.1)
        if batch is not None:
            for row, value in zip(batch.ids, batch["response"], strict=True):
                np.testing.assert_array_equal(value, response_of(row.group_id, row.sample_index))
            seen.update(group.group_id for group in batch.groups)
            client.ack(batch.lease)
            client.finish_val([group.group_id for group in batch.groups])
        for until_s, process in [one for one in stopped if one[0] <= time.monotonic()]:
            stopped.remove((until_s, process))
            os.kill(process.pid, signal.SIGCONT)
        if faults and time.monotonic() >= next_fault:
            next_fault = time.monotonic() + draw.uniform(0.3, 0.8)
            fault = faults.pop()
            place = draw.choice([i for i in range(len(workers)) if all(workers[i] is not one for _, one in stopped)])
            if fault == "worker":
                end(workers[place])
                workers[place] = start("work", address, f"worker{next(names)}", stages[place])
            elif fault == "stop":
                os.kill(workers[place].pid, signal.SIGSTOP)
                stopped.append((time.monotonic() + draw.uniform(1.0, 1.5) * LEASE_S, workers[place]))
            else:
                end(dock)
                dock = start("host_compacting", *words)
    assert seen == dict.fromkeys(range(total), 1)
    counts = client.ledger_counts()
    assert (counts["val_admitted"], counts["val_ended"]) == (total, total)


if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
