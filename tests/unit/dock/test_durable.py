"""A dock whose process is killed at awkward moments: its successor holds what it held, however the journal began."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tranship.dock import Dock, DockFull, StageNeeds, StaleLease, durable
from tranship.dock.durable import DurableDock
from tranship.dock.journal import Journal
from tranship.dock.messages import Admission, BlockRef, Publish
from tranship.dock.slab import PAYLOAD_AT
from tranship.dock.wire import bind, decode_reply, decode_request, encode_request
from tranship.types import SampleId

STAGES = (
    StageNeeds("rollout", ("prompt",)),
    StageNeeds("score", ("response",), "row"),
    StageNeeds("train", ("prompt", "response", "reward")),
)
LEASE_S = 10.0


class Host:
    """The process of a durable dock, without a socket; `crash` puts a successor in its place."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now = 0.0
        self.ticket = 0
        self.refs = 0
        self.durable = DurableDock(self._make, now=lambda: self.now)

    def _make(self, clock: Any, adopt: Path | None) -> Dock:
        return Dock(
            STAGES,
            run_id="durable",
            batch_groups=4,
            staleness=15,
            lease_s=LEASE_S,
            slab_bytes=1 << 16,
            capacity_bytes=1 << 20,
            shared=True,
            ordered=False,
            clock=clock,
            root=self.root,
            adopt=adopt,
        )

    @property
    def dock(self) -> Dock:
        return self.durable.dock

    @property
    def journal(self) -> Journal:
        assert self.durable._journal is not None
        return self.durable._journal

    def send(self, name: str, method: str, *args: Any, ticket: int = 0, waiting: bool = False, **kwargs: Any) -> Any:
        """The reply's bytes; None if the message would rather wait."""
        self.ticket += 1
        body = encode_request(method, bind(method, args, kwargs), 1.0 if waiting else 0.0, ticket or self.ticket)
        return self.durable.run(name, ticket or self.ticket, decode_request(body), body, waiting=waiting)

    def say(self, name: str, method: str, *args: Any, **kwargs: Any) -> Any:
        return decode_reply(method, self.send(name, method, *args, **kwargs))

    def take(self, name: str, stage: str = "rollout", count: int = 1, **more: Any) -> Any:
        return self.say(name, "ask", "take", stage, name, max_groups=count, kinds=("train", "val"), **more).take

    def block(self, name: str) -> BlockRef:
        """A block in a new slab of a client."""
        slab = self.say(name, "lease_slab", name, 100)
        return BlockRef(slab.slab, slab.generation, PAYLOAD_AT, 64)

    def admit(self, *ids: int, block: BlockRef, kind: str = "train") -> None:
        self.say("source", "admit", [Admission(i, 2, kind, block, ("prompt",)) for i in ids])

    def state(self) -> Any:
        """All that the dock holds, but for the time of its leases."""
        base = self.dock.base()
        base["flow"]["leases"] = [base["flow"]["leases"][0], [x[:4] + x[5:] for x in base["flow"]["leases"][1]]]
        return msgpack.unpackb(msgpack.packb(base), strict_map_key=False)

    def crash(self) -> None:
        before, last, acknowledged = self.state(), self.durable._last, self.durable._acknowledged
        folder = self.dock.warehouse.home._folder
        assert folder is not None
        os.close(folder._lock)
        self.durable.close()
        self.durable = DurableDock(self._make, folder.path, now=lambda: self.now)
        assert self.state() == before
        assert self.durable._last.items() <= last.items()
        assert self.durable._acknowledged == acknowledged


@pytest.fixture
def host(tmp_path):
    host = Host(tmp_path)
    yield host
    host.durable.close()
    host.dock.close()
    assert list(tmp_path.iterdir()) == []


def start_again(host: Host) -> None:
    host.durable._compact_at = 0
    host.durable._compact()
    assert [entry[0] for entry in host.journal.entries()] == ["b"]


def test_a_base_holds_groups_in_every_place_and_leases_keep_their_time(host):
    prompts, own = host.block("source"), host.block("worker")
    host.admit(*range(8), block=prompts)
    host.admit(-1, -2, block=prompts, kind="val")
    leases = [host.take("worker", count=2) for _ in range(3)]
    rows = [SampleId(i, index) for i in (0, 1) for index in range(2)]
    host.say("worker", "publish", Publish("worker", own, rows, ("response",), leases[0].lease, 0))
    host.say("worker", "ack", leases[0].lease)
    host.say("worker", "release", leases[1].lease)
    one = host.say("scorer", "ask", "take_rows", "score", "scorer", max_rows=1).take
    host.say("scorer", "publish", Publish("worker", replace_offset(own), rows[:1], ("reward",), one.lease))
    host.say("source", "drop", [4], "filtered", leases[2].lease)
    host.now = LEASE_S - 1
    host.say("worker", "renew", leases[2].lease)
    start_again(host)
    before = host.state()
    host.now = LEASE_S + 1
    assert [lease.id for lease in host.dock._flow.leases.overdue(host.now)] == [one.lease]
    host.say("anybody", "status")
    assert host.state() != before
    start_again(host)
    host.crash()
    start_again(host)
    host.crash()
    assert [one.lease for one in host.say("anybody", "expire")] == [one.lease]


def replace_offset(ref: BlockRef) -> BlockRef:
    return ref._replace(offset=ref.offset + 64)


def test_what_a_waiting_take_acknowledged_is_known_after_a_base_and_a_crash(host):
    host.admit(0, block=host.block("source"))
    lease = host.take("worker").lease
    asked = ("ask", "take", "rollout", "worker")
    assert host.send("worker", *asked, max_groups=1, done=[lease], ticket=77, waiting=True) is None
    start_again(host)
    host.crash()
    host.admit(1, block=host.block("source"))
    again = decode_reply("ask", host.send("worker", *asked, max_groups=1, done=[lease], ticket=77, waiting=True))
    assert again.take.groups[0].group_id == 1
    with pytest.raises(StaleLease):
        host.say("worker", "ack", lease)


def test_the_stage_that_takes_batches_is_known_after_a_crash_though_it_got_none(host):
    host.admit(0, block=host.block("source"))
    assert host.say("trainer", "ask", "take_batch", "train", "trainer", groups=4).take is None
    host.crash()
    with pytest.raises(ValueError, match="takes batches"):
        host.take("trainer", "train")


def test_a_repeated_message_is_answered_as_before_after_a_base_and_a_crash(host):
    host.admit(0, 1, block=host.block("source"))
    first = host.send("worker", "ask", "take", "rollout", "worker", max_groups=1, ticket=55)
    start_again(host)
    host.crash()
    assert host.send("worker", "ask", "take", "rollout", "worker", max_groups=1, ticket=55) == first
    assert host.take("worker").groups[0].group_id == 1


def test_a_journal_stays_short_while_groups_are_always_in_flight(host, monkeypatch):
    """Without an end to look forward to: there is always a group with a reader."""
    monkeypatch.setattr(durable, "_COMPACT_BYTES", 1 << 14)
    host.durable._compact_at = 1 << 14
    longest, sent = 0, 0
    block = host.block("source")
    host.admit(0, block=block, kind="val")
    held = host.take("worker").lease
    for i in range(400):
        host.admit(-1 - i, block=block, kind="val")
        lease = host.take("worker").lease
        host.say("worker", "ack", held)
        host.say("source", "finish_val", [-i])
        held = lease
        longest = max(longest, host.journal.nbytes)
        sent += 4 * 80
    assert len(host.dock._flow.table) == 1
    assert longest < (1 << 14) + 1000 < sent / 4
    host.crash()
    host.say("worker", "ack", held)


@pytest.fixture
def full(monkeypatch):
    """From the call on the file system has no room for a byte more."""

    def no_room(descriptor, offset, length):
        raise OSError(errno.ENOSPC, "no space left on device")

    return lambda: monkeypatch.setattr(os, "posix_fallocate", no_room)


def fill_journal(host: Host, block: BlockRef) -> int:
    """Admit until the journal has no room; returns how many were admitted."""
    for i in range(1 << 20):
        try:
            host.admit(-1 - i, block=block, kind="val")
        except DockFull:
            return i
    raise AssertionError("the journal never was full")


def test_with_a_full_file_system_groups_can_leave_and_nothing_is_ahead_of_the_journal(host, full):
    block = host.block("source")
    host.admit(0, block=block)
    lease = host.take("worker").lease
    full()
    count = fill_journal(host, block)
    before = host.state()
    for refused in (lambda: host.take("worker"), lambda: host.block("worker")):
        with pytest.raises(DockFull, match="journal cannot be written"):
            refused()
    assert host.state() == before
    host.say("worker", "ack", lease)
    host.say("source", "finish_val", [-1 - i for i in range(count)])
    host.crash()
    assert len(host.dock._flow.table) == 1


def test_a_client_that_goes_when_the_journal_is_full_is_forgotten_when_it_is_not(host, full, monkeypatch):
    block = host.block("source")
    host.admit(0, block=block)
    host.take("worker")
    full()
    fill_journal(host, block)
    monkeypatch.setattr(durable, "_ROOM_BYTES", 1 << 20)
    host.durable.forget("worker")
    assert len(host.dock._flow.leases) == 1
    host.crash()
    host.durable.forget("worker")
    monkeypatch.undo()
    host.say("anybody", "status")
    assert len(host.dock._flow.leases) == 0
    host.crash()
    assert host.take("other").groups[0].group_id == 0


def test_a_client_that_is_back_before_it_could_be_forgotten_keeps_what_it_has(host, full, monkeypatch):
    block = host.block("source")
    host.admit(0, block=block)
    lease = host.take("worker").lease
    full()
    fill_journal(host, block)
    monkeypatch.setattr(durable, "_ROOM_BYTES", 1 << 20)
    host.durable.forget("worker")
    monkeypatch.undo()
    host.say("worker", "renew", lease)


def test_free_slabs_make_room_for_the_journal(host, monkeypatch):
    block = host.block("source")
    host.admit(-1, block=block, kind="val")
    ended = host.block("worker")
    host.admit(-2, block=ended, kind="val")
    host.say("worker", "lease_slab", "worker", 100, ended.slab)
    host.say("source", "finish_val", [-2])
    assert host.dock.warehouse.free_slabs() == [ended.slab]
    allocate = os.posix_fallocate

    def little_room(descriptor, offset, length):
        if (Path(host.dock.payload_folder() or "") / f"{ended.slab}.slab").exists():
            raise OSError(errno.ENOSPC, "no space left on device")
        allocate(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", little_room)
    count = 0
    while host.dock.warehouse.free_slabs():
        host.admit(*range(-100 * (count + 2), -100 * (count + 1)), block=block, kind="val")
        count += 1
    host.crash()
    assert len(host.dock._flow.table) == 1 + 100 * count


def test_a_base_that_cannot_be_written_is_tried_again_later(host, full, monkeypatch):
    host.admit(0, block=host.block("source"))
    allocate = os.posix_fallocate
    full()
    host.durable._compact_at = 0
    host.durable._compact()
    assert host.durable._compact_at == 2 * host.journal.nbytes > 0
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    host.crash()
    start_again(host)
    host.crash()
