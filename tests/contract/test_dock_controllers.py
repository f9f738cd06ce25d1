"""What happens to rows when stages' controllers, in processes of their own, are killed or stopped, or the dock is.

Run as a program, this file is one of those processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest

from tranship.dock import Dock, DockClient, DockProxy, ServedDock, StageController, StageNeeds, StaleLease
from tranship.dock.frames import ConnectionLost
from tranship.dock.routes import Routes
from tranship.dock.shared_folder import left_by
from tranship.dock.stage_dock import number_of, stage_number
from tranship.types import SampleId

SECRET = b"a secret of this test"
LEASE_S = 1.0
RECONNECT_S = 30.0
STAGES = (
    StageNeeds("rollout", ("prompt",)),
    StageNeeds("read", ("response",)),
    StageNeeds("score", ("response",), "row"),
    StageNeeds("done", ("response", "read_by", "score")),
)
SPREAD = ("read", "score", "done")
Start = Callable[..., subprocess.Popen[bytes]]


def response_of(row: SampleId) -> np.ndarray:
    return np.arange(500 + row.group_id, dtype=np.int32) * (row.sample_index + 1)


def serve(root: str, socket: str) -> ServedDock:
    """A durable dock; it goes on where one was killed."""
    return ServedDock(
        lambda clock, adopt: Dock(
            STAGES,
            run_id="controllers",
            batch_groups=4,
            staleness=0,
            lease_s=LEASE_S,
            slab_bytes=1 << 18,
            capacity_bytes=1 << 25,
            shared=True,
            ordered=False,
            root=Path(root),
            clock=clock,
            adopt=adopt,
        ),
        [f"unix:{socket}"],
        secret=SECRET,
        durable=True,
        adopt=left_by("controllers", Path(root)),
    )


def connect(home: str, name: str, controllers: dict[str, str]) -> DockClient:
    return DockClient.connect(
        home,
        SECRET,
        name,
        wait_s=20.0,
        reconnect_s=RECONNECT_S,
        controllers=dict.fromkeys(SPREAD, "unix:/none") | controllers,
    )


# The processes


def host(socket: str, root: str) -> None:
    """A dock, until it is killed."""
    serve(root, socket)
    print("ready", flush=True)
    signal.pause()


def control(home: str, stage: str, address: str) -> None:
    """A stage's controller, until it is killed or the dock is gone."""
    controller = StageController(
        next(needs for needs in STAGES if needs.name == stage),
        home,
        [address],
        secret=SECRET,
        number=stage_number(stage, SPREAD),
        lease_s=LEASE_S,
        prefetch=4,
        reconnect_s=RECONNECT_S,
    )
    print("ready", flush=True)
    with suppress(ConnectionLost):
        controller.wait()


def work(home: str, stage: str, name: str, controllers: str) -> None:
    """Do rows at a stage until it is killed; its own losses are no reason to stop."""
    client = connect(home, name, json.loads(controllers))
    done: list[int] = []
    while True:
        with suppress(StaleLease):
            last, done = done, []
            if stage == "score":
                batch = client.take_rows(stage, max_rows=3, kinds=("val",), done=last, wait_s=5.0)
            else:
                batch = client.take(stage, max_groups=2, kinds=("val",), done=last, wait_s=5.0)
            if batch is None:
                continue
            columns: dict[str, list[object]] = {"response": [response_of(row) for row in batch.ids]}
            if stage != "rollout":
                for row, value in zip(batch.ids, batch["response"], strict=True):
                    np.testing.assert_array_equal(value, response_of(row))
                columns = {"read": {"read_by": [name] * len(batch)}, "score": {"score": [1.0] * len(batch)}}[stage]
            client.put(batch.ids, columns, batch.lease)
            done = [batch.lease]


# The tests


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts one of these processes; all have ended at the end."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(role: str, *words: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, __file__, role, *words],
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        processes.append(process)
        if role != "work":
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in processes:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture
def home(tmp_path) -> Iterator[str]:
    (tmp_path / "shm").mkdir()
    served = serve(str(tmp_path / "shm"), str(tmp_path / "dock"))
    yield served.addresses[0]
    served.close()


def admit(client: DockClient, *group_ids: int) -> None:
    client.admit([(i, 2, "val", {"prompt": np.full(3, i)}) for i in group_ids])


def put(client: DockClient, *group_ids: int) -> None:
    rows = [SampleId(group_id, index) for group_id in group_ids for index in range(2)]
    client.put(rows, {"response": [response_of(row) for row in rows], "score": [1.0] * len(rows)})


def end_groups(client: DockClient, count: int) -> dict[int, str]:
    """End so many groups that are done; who has read each of them."""
    read_by: dict[int, str] = {}
    while len(read_by) < count:
        batch = client.take("done", max_groups=10, kinds=("val",), wait_s=15.0)
        assert batch is not None, client.ledger_counts()
        for row, value, name in zip(batch.ids, batch["response"], batch["read_by"], strict=True):
            np.testing.assert_array_equal(value, response_of(row))
            read_by[row.group_id] = name
        client.finish_val([group.group_id for group in batch.groups])
        with suppress(StaleLease):
            client.ack(batch.lease)
    counts = client.ledger_counts()
    assert counts["val_admitted"] == counts["val_ended"]
    return read_by


@pytest.mark.parametrize("stopped", [False, True], ids=["SIGKILL", "SIGSTOP"])
def test_what_a_dead_or_stopped_controller_had_goes_to_its_successor(home, start, tmp_path, stopped):
    addresses = [f"unix:{tmp_path / name}" for name in ("first", "second")]
    first = start("control", home, "read", addresses[0])
    second = start("control", home, "read", addresses[1])
    reader = connect(home, "reader", {"read": addresses[0]})
    other = connect(home, "other", {"read": addresses[1]})
    admit(reader, *range(6))
    put(reader, *range(6))
    held = reader.take("read", max_groups=2, kinds=("val",), wait_s=10.0)
    assert held is not None
    assert number_of(held.lease)
    reader.put(held.ids[:2], {"read_by": ["reader"] * 2}, held.lease)
    os.kill(first.pid, signal.SIGSTOP if stopped else signal.SIGKILL)
    start_s = time.monotonic()
    taken: list[int] = []
    while len(taken) < 6:
        batch = other.take("read", max_groups=4, kinds=("val",), wait_s=LEASE_S + 5.0)
        assert batch is not None
        assert number_of(batch.lease)
        taken += [group.group_id for group in batch.groups]
        other.put(batch.ids, {"read_by": ["other"] * len(batch)}, batch.lease)
        other.ack(batch.lease)
    assert time.monotonic() - start_s <= (LEASE_S if stopped else 0.0) + 1.0
    assert sorted(taken) == list(range(6))
    if stopped:
        os.kill(first.pid, signal.SIGCONT)
    with pytest.raises(StaleLease):
        reader.put(held.ids, {"read_by": ["reader"] * 4}, held.lease)
    with pytest.raises(StaleLease):
        reader.ack(held.lease)
    second.kill()
    admit(reader, 6)
    put(reader, 6)
    batch = reader.take("read", max_groups=1, kinds=("val",), wait_s=10.0)
    assert batch is not None
    assert (number_of(batch.lease) > 0) == stopped
    reader.put(batch.ids, {"read_by": ["reader"] * 2}, batch.lease)
    reader.ack(batch.lease)
    first_group = held.groups[0].group_id
    assert end_groups(reader, 7) == {i: "reader" if i in (first_group, 6) else "other" for i in range(7)}


def test_nothing_is_lost_when_controllers_and_readers_are_killed_again_and_again(home, start, tmp_path):
    addresses = {stage: f"unix:{tmp_path / stage}" for stage in SPREAD}
    controllers = {stage: start("control", home, stage, address) for stage, address in addresses.items()}
    words = json.dumps(addresses)
    names = [(stage, f"{stage}{i}") for stage in ("rollout", "read", "score") for i in range(2)]
    workers = {name: start("work", home, stage, name, words) for stage, name in names}
    client = connect(home, "client", addresses)
    for turn, (kill, worker) in enumerate([("read", "rollout0"), ("score", "read0"), ("done", "score0"), (None, None)]):
        admit(client, *range(15 * turn, 15 * turn + 15))
        if kill is not None:
            time.sleep(0.05)
            end(controllers[kill])
            controllers[kill] = start("control", home, kill, addresses[kill])
            end(workers[worker])
        assert set(end_groups(client, 15).values()) <= {"read0", "read1"}


def test_controllers_and_their_readers_go_on_with_the_successor_of_a_killed_dock(start, tmp_path):
    (tmp_path / "shm").mkdir()
    words = (str(tmp_path / "dock"), str(tmp_path / "shm"))
    home, address = f"unix:{words[0]}", f"unix:{tmp_path / 'read'}"
    dock = start("host", *words)
    start("control", home, "read", address)
    client = connect(home, "client", {"read": address})
    admit(client, *range(6))
    put(client, *range(6))
    held = client.take("read", max_groups=2, kinds=("val",), wait_s=10.0)
    assert held is not None
    for _ in range(2):
        end(dock)
        dock = start("host", *words)
        assert client.renew(held.lease) == ()
    while held is not None:
        assert number_of(held.lease)
        client.put(held.ids, {"read_by": ["client"] * len(held)}, held.lease)
        client.ack(held.lease)
        held = client.take("read", max_groups=2, kinds=("val",), wait_s=0.5)
    assert set(end_groups(client, 6)) == set(range(6))


def test_a_reader_that_does_not_wait_is_woken_by_its_controller_and_by_its_end(home, start, tmp_path):
    address = f"unix:{tmp_path / 'read'}"
    process = start("control", home, "read", address)
    writer = connect(home, "writer", {})
    with ExitStack() as stack:
        proxy = DockProxy(home, SECRET, "reader")
        stack.callback(proxy.close)
        routes = Routes(proxy.call, {"read": address}, SECRET, "reader", home_seq=lambda: proxy.seen_seq)
        stack.callback(routes.close)
        wakeup = threading.Event()
        proxy.watch(wakeup)
        routes.watch(wakeup)
        reader = DockClient(routes.call, "reader", wait_s=5.0, seen_seq=routes.seen_seq)

        def taken() -> int:
            """The next group, as a worker looks for it: only when something has changed. Returns its lease."""
            deadline = time.monotonic() + 20.0
            while True:
                wakeup.clear()
                if reader.changed_since_last_take("read", kinds=("val",)):
                    batch = reader.take("read", max_groups=1, kinds=("val",))
                    if batch is not None:
                        return batch.lease
                    continue
                assert wakeup.wait(deadline - time.monotonic())

        for group_id in range(3):
            threading.Timer(0.05, lambda group_id=group_id: (admit(writer, group_id), put(writer, group_id))).start()
            lease = taken()
            assert number_of(lease) == stage_number("read", SPREAD)
            reader.ack(lease)
        end(process)
        threading.Timer(0.05, lambda: (admit(writer, 3), put(writer, 3))).start()
        assert number_of(taken()) == 0
        start("control", home, "read", address)
        for group_id in range(4, 50):
            admit(writer, group_id)
            put(writer, group_id)
            if number_of(taken()):
                break
            time.sleep(0.1)
        else:
            pytest.fail("the successor was never asked")


if __name__ == "__main__":
    {"host": host, "control": control, "work": work}[sys.argv[1]](*sys.argv[2:])
