"""A dock behind sockets: takes that wait, clients that vanish, strangers and malformed messages."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import closing
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tranship.dock import Dock, DockClient, DockFull, StageNeeds, StaleLease
from tranship.dock.durable import DurableDock
from tranship.dock.frames import LENGTH, ConnectionLost, connect, receive_frame, send_frame
from tranship.dock.link import DockLink, DockProxy
from tranship.dock.service import DockService
from tranship.types import SampleId, UserError

STAGES = (StageNeeds("rollout", ("prompt",)), StageNeeds("score", ("response",), "row"))
SECRET = b"sixteen bytes or more"
LEASE_S = 0.5


@pytest.fixture(params=["unix", "tcp"])
def service(request, tmp_path):
    dock = Dock(
        STAGES,
        run_id="service",
        batch_groups=4,
        staleness=0,
        lease_s=LEASE_S,
        slab_bytes=1 << 14,
        capacity_bytes=1 << 16,
        shared=True,
        ordered=False,
        root=tmp_path,
    )
    address = f"unix:{tmp_path / 'socket'}" if request.param == "unix" else "tcp:127.0.0.1:0"
    service = DockService(dock, [address], secret=SECRET).start()
    yield service
    service.close()
    dock.close()
    assert list(tmp_path.iterdir()) == []


def client_of(service: DockService, name: str, wait_s: float = 5.0) -> DockClient:
    return DockClient.connect(service.addresses[0], SECRET, name, wait_s=wait_s)


def admit(client: DockClient, *group_ids: int, size: int = 2) -> None:
    client.admit([(i, size, "val", {"prompt": np.arange(3, dtype=np.int32) + i}) for i in group_ids])


def take(client: DockClient, wait_s: float = 0.0, groups: int = 1):
    return client.take("rollout", max_groups=groups, kinds=("val",), wait_s=wait_s)


def later(run) -> threading.Thread:
    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_take_waits_for_rows_and_nobody_else_does(service):
    reader, writer = client_of(service, "reader"), client_of(service, "writer")
    found = []
    waiting = later(lambda: found.append((take(reader, 10.0), time.monotonic())))
    for _ in range(200):
        start = time.monotonic()
        writer.status()
        assert time.monotonic() - start < 1.0
    assert found == []
    put_at = time.monotonic()
    admit(writer, 7)
    waiting.join(5)
    batch, got_at = found[0]
    assert batch["prompt"][0].tolist() == [7, 8, 9]
    assert got_at - put_at < 1.0


def test_of_many_that_wait_each_gets_its_own(service):
    readers = [client_of(service, f"reader{i}") for i in range(6)]
    found = []
    waiting = [later(lambda reader=reader: found.append(take(reader, 10.0))) for reader in readers]
    writer = client_of(service, "writer")
    admit(writer, *range(4))
    admit(writer, 4, 5)
    for thread in waiting:
        thread.join(5)
    assert sorted(batch.groups[0].group_id for batch in found) == list(range(6))


def test_a_take_that_waits_in_vain_comes_back_in_time(service):
    reader = client_of(service, "reader")
    start = time.monotonic()
    assert take(reader, 0.2) is None
    assert 0.2 <= time.monotonic() - start < 1.5
    assert take(reader) is None


def test_the_rows_of_a_client_that_vanishes_go_to_one_that_waits(service):
    holder, other = client_of(service, "holder"), client_of(service, "other")
    admit(other, 1)
    assert take(holder) is not None
    found = []
    waiting = later(lambda: found.append((take(other, 10.0), time.monotonic())))
    time.sleep(0.05)
    gone_at = time.monotonic()
    holder._call.__self__.close()
    waiting.join(5)
    assert found[0][0] is not None
    assert found[0][1] - gone_at < LEASE_S


def test_a_silent_clients_lease_wakes_one_that_waits(service):
    holder, other = client_of(service, "holder"), client_of(service, "other")
    admit(other, 1)
    batch = take(holder)
    assert batch is not None
    start = time.monotonic()
    assert take(other, 10.0) is not None
    assert time.monotonic() - start < LEASE_S + 1.0
    with pytest.raises(StaleLease):
        holder.ack(batch.lease)


def test_the_last_lease_is_acknowledged_with_the_next_take(service):
    client = client_of(service, "client")
    admit(client, 1, 2)
    first = take(client)
    second = client.take("rollout", max_groups=1, kinds=("val",), done=[first.lease])
    assert second.groups[0].group_id == 2
    with pytest.raises(StaleLease):
        client.renew(first.lease)
    with pytest.raises(StaleLease):
        client.take("rollout", max_groups=1, kinds=("val",), done=[second.lease, first.lease])
    client.renew(second.lease)


def test_what_a_waiting_take_acknowledged_is_acknowledged_once(service):
    client = client_of(service, "client")
    admit(client, 1)
    batch = take(client)
    found = []
    waiting = later(
        lambda: found.append(
            client.take("rollout", max_groups=1, kinds=("val",), done=[batch.lease], wait_s=10.0),
        )
    )
    time.sleep(0.05)
    admit(client_of(service, "other"), 2)
    waiting.join(5)
    assert found[0].groups[0].group_id == 2


def test_a_put_waits_for_room_and_says_what_is_full(service):
    writer, other = client_of(service, "writer", wait_s=0.3), client_of(service, "other", wait_s=10.0)
    admit(other, 3, size=1)
    admit(writer, 0, 1, size=1)
    big = {"response": [np.zeros(15900, np.uint8)]}
    for group_id in range(2):
        writer.put([SampleId(group_id, 0)], big)
    with pytest.raises(DockFull, match=r"waited 0\.\d s for room .* in use"):
        writer.put([SampleId(3, 0)], big)
    done = []
    waiting = later(lambda: done.append(other.put([SampleId(3, 0)], big)))
    time.sleep(0.05)
    assert done == []
    writer.finish_val([0, 1])
    waiting.join(5)
    assert done == [None]


def test_a_stranger_gets_nothing(service):
    with pytest.raises(ConnectionLost):
        DockLink(service.addresses[0], b"another secret, as long", "stranger")
    client_of(service, "client").status()


def test_a_service_of_another_run_is_told_apart(tmp_path):
    """Somebody who listens at the address and does not know the secret cannot play the dock."""
    path = tmp_path / "impostor"
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as listener:
        listener.bind(str(path))
        listener.listen()

        def play():
            stream, _ = listener.accept()
            with stream:
                stream.sendall(bytes(32))
                stream.recv(64)
                stream.sendall(bytes(32))

        thread = later(play)
        with pytest.raises(ConnectionLost, match="does not know the run's secret"):
            connect(f"unix:{path}", SECRET, 5.0)
        thread.join(5)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        msgpack.packb(["close", {}, 0.0, 0]),
        msgpack.packb(["ack", {"lease": "x"}, 0.0, 0]),
        os.urandom(1000),
    ],
)
def test_a_malformed_message_ends_its_own_connection_alone(service, frame):
    good = client_of(service, "good")
    bad = connect(service.addresses[0], SECRET, 5.0)
    with bad:
        send_frame(bad, b"bad")
        receive_frame(bad)
        send_frame(bad, frame)
        ok, kind, words = msgpack.unpackb(receive_frame(bad))
        assert (ok, kind) == (False, "ValueError")
        assert words.startswith("malformed message")
        assert bad.recv(1) == b""
    good.status()


def test_a_frame_that_is_too_long_is_refused_before_it_is_read(service):
    with connect(service.addresses[0], SECRET, 5.0) as bad:
        send_frame(bad, b"bad")
        receive_frame(bad)
        bad.sendall(LENGTH.pack(0xFFFFFFFF))
        assert "limit" in msgpack.unpackb(receive_frame(bad))[2]
    client_of(service, "good").status()


def test_arguments_that_do_not_fit_a_method_are_an_error_of_the_caller(service):
    link = DockLink(service.addresses[0], SECRET, "client")
    with pytest.raises(ValueError, match="malformed message"):
        link.call("ask", "take", "rollout", "client")
    with pytest.raises(ValueError, match="no stage is called"):
        link.call("ask", "take", "nowhere", "client", max_groups=1)
    with pytest.raises(ValueError, match="none of"):
        link.call("close")
    link.call("status")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300), st.booleans(), st.booleans())
def test_any_bytes_at_any_time_harm_nobody(service, data, knows_secret, as_frame):
    good = service.__dict__.setdefault("good", None) or client_of(service, "good")
    service.__dict__["good"] = good
    if knows_secret:
        stream = connect(service.addresses[0], SECRET, 5.0)
        if as_frame:
            send_frame(stream, b"bad")
            receive_frame(stream)
            send_frame(stream, data)
        else:
            stream.sendall(data)
    else:
        kind, _, where = service.addresses[0].partition(":")
        stream = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET, socket.SOCK_STREAM)
        stream.connect(where if kind == "unix" else (where.rpartition(":")[0], int(where.rpartition(":")[2])))
        stream.sendall(data)
    stream.close()
    good.status()


def test_when_the_service_ends_clients_are_told(service):
    client = client_of(service, "client")
    service.close()
    with pytest.raises(ConnectionLost, match="is gone"):
        client.status()


def test_a_socket_that_a_dead_service_left_is_taken_over(tmp_path):
    path = tmp_path / "socket"
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    dead.bind(str(path))
    dead.close()
    dock = Dock(
        STAGES,
        run_id="again",
        batch_groups=1,
        staleness=0,
        lease_s=1,
        slab_bytes=1 << 14,
        capacity_bytes=1 << 16,
        shared=False,
        ordered=False,
    )
    service = DockService(dock, [f"unix:{path}"], secret=SECRET).start()
    DockLink(service.addresses[0], SECRET, "client").call("status")
    with pytest.raises(UserError, match="cannot listen"):
        DockService(dock, [f"unix:{path}"], secret=SECRET)
    service.close()
    assert not Path(path).exists()


def test_addresses_and_secrets_that_cannot_be(tmp_path):
    for address in ("", "unix:", "tcp:host", "tcp:host:port", "http://x", "tcp:h:99999"):
        with pytest.raises(UserError, match="no address of a dock"):
            connect(address, SECRET, 1.0)
    with pytest.raises(UserError, match="at least 16"):
        DockService(None, [], secret=b"short")  # type: ignore[arg-type]
    with pytest.raises(ConnectionLost, match="no connection"):
        connect(f"unix:{tmp_path / 'nobody'}", SECRET, 1.0)


def test_a_watcher_waits_at_the_dock_without_asking_again(service, monkeypatch):
    asked = []
    run = DurableDock.run
    monkeypatch.setattr(DurableDock, "run", lambda *args, **kwargs: (asked.append(1), run(*args, **kwargs))[1])
    proxy = DockProxy(service.addresses[0], SECRET, "worker")
    proxy.watch(threading.Event())
    client = client_of(service, "client")
    admit(client, 1)
    assert take(client) is not None
    time.sleep(LEASE_S + 0.2)
    assert len(asked) <= 20
    proxy.close()


def test_a_watcher_hears_of_every_change_and_of_the_end(service):
    proxy = DockProxy(service.addresses[0], SECRET, "worker")
    wakeup = threading.Event()
    proxy.watch(wakeup)
    assert proxy.call("status").seq == 0
    client = client_of(service, "client")
    seen = -1
    for group_id in range(3):
        admit(client, group_id)
        while proxy.seen_seq < client.status().seq:
            assert wakeup.wait(5.0)
            wakeup.clear()
        assert proxy.seen_seq > seen
        seen = proxy.seen_seq
    time.sleep(0.05)
    wakeup.clear()
    client.status()
    assert not wakeup.wait(0.1)
    service.close()
    assert wakeup.wait(5.0)
    with pytest.raises(ConnectionLost, match="is gone"):
        _ = proxy.seen_seq


def test_a_proxy_is_closed_under_its_watcher(service):
    proxy = DockProxy(service.addresses[0], SECRET, "worker", reconnect_s=60.0)
    wakeup = threading.Event()
    proxy.watch(wakeup)
    time.sleep(0.05)
    wakeup.clear()
    proxy.close()
    assert wakeup.wait(5.0)
    with pytest.raises(ConnectionLost):
        proxy.call("status")


def test_strangers_who_say_nothing_keep_nobody_out(service):
    kind, _, where = service.addresses[0].partition(":")
    family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
    place = where if kind == "unix" else (where.rpartition(":")[0], int(where.rpartition(":")[2]))
    strangers = [socket.socket(family, socket.SOCK_STREAM) for _ in range(200)]
    for stranger in strangers:
        stranger.connect(place)
    client_of(service, "client").status()
    for stranger in strangers:
        stranger.close()
