"""What reads bytes that others send, as functions of bytes: each returns, or fails the run by an exception.

Refusals that the format promises (ValueError and the errors that a dock may answer) are no failures. Used by the two
fuzzers: `guided_fuzzer`, which is always there, and `fuzz_with_atheris`, where atheris is installed.
"""

from __future__ import annotations

import selectors
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from tranship.dock import Block, Dock, StageNeeds, StaleLease, StaleSlab, Warehouse, pack
from tranship.dock.durable import DurableDock
from tranship.dock.frames import LENGTH, NONCE_BYTES, ConnectionLost, proof, receive
from tranship.dock.journal import Journal
from tranship.dock.messages import Admission, Answer, BlockRef, GroupEntry, Publish, SlabLease, Status, Take
from tranship.dock.runs import COUNT, PUT, RUN, SLAB, RunServer, _Files
from tranship.dock.service import DockService
from tranship.dock.slab import PAYLOAD_AT, slab_path
from tranship.dock.wire import (
    MAX_WAIT_S,
    METHODS,
    decode_place,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)
from tranship.types import RunError, SampleId

SECRET = b"a secret of the fuzzers"
STAGES = (StageNeeds("rollout", ("prompt",)), StageNeeds("score", ("response",), "row"))
MAX_BYTES = 1 << 13


@dataclass
class Target:
    """run(data) is what is fuzzed. seeds: inputs that mean something. close: after the last one. cost: of a run, more
    or less, beside that of the others."""

    run: Callable[[bytes], None]
    seeds: list[bytes]
    close: Callable[[], None] = lambda: None
    cost: int = 1


def make_dock(**more: Any) -> Dock:
    settings = {"batch_groups": 2, "staleness": 1, "lease_s": 5.0, "slab_bytes": 1 << 12, "capacity_bytes": 1 << 15}
    return Dock(STAGES, run_id="fuzz", ordered=False, **(settings | more))


REF = BlockRef(1, 1, PAYLOAD_AT, 64)
ROWS = [SampleId(0, 0), SampleId(0, 1)]


def ask(method: str, stage: str, wait_s: float = 0.0, **more: Any) -> bytes:
    return encode_request("ask", {"method": method, "stage": stage, "reader": "me", **more}, wait_s)


# A whole story in messages: each can be told alone, and all together are one input of `messages`.
STORY = [
    encode_request("lease_slab", {"owner": "me", "min_bytes": 100}),
    encode_request("admit", {"groups": [Admission(0, 2, "train", REF, ("prompt",)), Admission(1, 1, "val", REF, ())]}),
    encode_request("admit", {"groups": [Admission(2, 2, "val", REF, ("prompt",))]}),
    ask("take", "rollout", max_groups=2, version=0, kinds=("train", "val")),
    encode_request("publish", {"publish": Publish("me", REF, ROWS, ("response",), 1, 0)}),
    encode_request("ack", {"lease": 1, "group_ids": [0]}),
    ask("take_rows", "score", max_rows=3, done=[1]),
    encode_request("started", {"lease": 1, "group_id": 2, "version": 0}),
    encode_request("release", {"lease": 2}),
    encode_request("drop", {"group_ids": [0], "reason": "filtered", "lease": None}),
    ask("take_batch", "rollout", 3.0, groups=2),
    encode_request("trained", {"lease": 3}),
    encode_request("check", {"leases": [1]}),
    encode_request("renew", {"lease": 1}),
    encode_request("finish_val", {"group_ids": [1, 2]}),
    encode_request("retire", {"reader": "me"}),
    *(encode_request(method, {}) for method in ("status", "snapshot", "expire", "memory_use", "ledger_counts")),
    encode_request("open_warehouse", {"name": "b", "folder": "/dev/shm/b", "runs": "tcp:127.0.0.1:1"}),
    encode_request("lease_slab", {"owner": "me", "min_bytes": 100, "node": 1}),
    encode_request("chores", {"node": 1, "beat": 0, "done": []}),
    encode_request("chores", {"node": 1, "beat": 1, "done": [((1 << 40) + 1, ""), ((1 << 40) + 2, "full")]}),
    encode_request("places", {}),
    encode_request("place_after", {"node": 1, "runs": "tcp:127.0.0.1:1"}),
]


def request(folder: Path) -> Target:
    """decode_request: what is understood means the same when it is said again."""

    def run(data: bytes) -> None:
        try:
            found = decode_request(data)
        except ValueError:
            return
        again = encode_request(found.method, found.arguments, found.wait_s, found.ticket)
        assert decode_request(again) == found, (found, data)

    return Target(run, STORY)


def reply(folder: Path) -> Target:
    """decode_reply of every method, which the first byte chooses, and decode_place."""
    names = sorted(METHODS)
    entry = GroupEntry(0, 2, "train", 0, {"prompt": REF}, (0, 1), {"response": (REF, REF._replace(slab=2))}, 3)
    results: dict[str, Any] = {
        "ask": Answer(Take(1, "score", 2.5, 3, (entry,), (0,), 1), 4),
        "status": Status(1, 2, 3, 4, 5),
        "lease_slab": SlabLease(1, 2, "/dev/shm/x", 4096),
        "renew": (1, 2),
        "trained": [1],
    }

    def run(data: bytes) -> None:
        try:
            if data[:1] == b"\xff":
                decode_place(data[1:])
            else:
                decode_reply(names[data[0] % len(names)] if data else "ack", data[1:])
        except (ValueError, RunError, StaleLease, StaleSlab):
            return

    seeds = [bytes([names.index(name)]) + encode_reply(name, result) for name, result in results.items()]
    return Target(run, [*seeds, b"\xff" + msgpack.packb(["node", "/dev/shm/x", "tcp:a:1"])])


def block(folder: Path) -> Target:
    """Block.parse, whole or only its head, and every value of it: memory outside the block is never looked at."""
    columns = {"x": [np.arange(4), np.arange(2)], "y": ["a", {"b": (1, None)}], "z": np.ones((2, 3, 2), np.float32)}
    seeds = []
    for names in (("x",), ("y",), ("x", "y", "z"), ()):
        made = pack(ROWS, {name: columns[name] for name in names})
        memory = bytearray(made.nbytes)
        made.write_into(memoryview(memory), generation=1, checksum=len(names) == 1)
        seeds.append(bytes(memory))

    def run(data: bytes) -> None:
        for head_only in (False, True):
            try:
                length = Block.head_bytes(memoryview(data), len(data))
                assert 64 <= length <= len(data)
                found = Block.parse(data, head_only=head_only, verify=data[-1:] == b"\x07")
            except ValueError:
                continue
            for name in found.column_names:
                column = found.column(name)
                start, size = column.span(0, len(found.rows))
                assert 0 <= start <= start + size <= len(data)
                for row in range(len(column)):
                    try:
                        column[row]
                    except ValueError:
                        continue

    return Target(run, seeds)


def journal(folder: Path) -> Target:
    """Any file is a journal: its whole entries are found, and more can follow them."""
    path = folder / "journal"
    made = Journal(path)
    for entry in (["w", 0.0, [1, []]], ["m", 1.5, "name", 7, STORY[0]], ["e", 2.0]):
        made.append(*entry)
    made.close()
    seed = path.read_bytes()[: made.nbytes]

    def run(data: bytes) -> None:
        path.write_bytes(data)
        found = Journal(path)
        entries = list(found.entries())
        found.append("more")
        assert list(found.entries()) == [*entries, ["more"]]
        found.close()

    return Target(run, [seed, seed + bytes(40), seed[:-3]], cost=8)


def runs(folder: Path) -> Target:
    """A RunServer's requests: no file but the slabs is touched, no header changes, and it ends by a named error."""
    warehouse = Warehouse("fuzz", 1 << 12, 1 << 14, True, root=folder)
    lease = warehouse.lease_slab("me", 100)
    assert lease is not None
    assert warehouse.folder is not None
    server = RunServer(warehouse.folder, "tcp:127.0.0.1:0", secret=SECRET)
    slab, generation = lease.slab, lease.generation
    file = slab_path(warehouse.folder, slab)
    head = file.read_bytes()[:PAYLOAD_AT]

    def run(data: bytes) -> None:
        theirs, ours = socket.socketpair()
        files = _Files(warehouse.folder or "")
        with theirs, ours:
            theirs.sendall(data[:MAX_BYTES])
            theirs.shutdown(socket.SHUT_WR)
            ours.settimeout(0.05)
            try:
                while True:
                    server._answer(ours, files)
            except (ValueError, ConnectionLost, TimeoutError):
                pass
        files.close()
        assert file.read_bytes()[:PAYLOAD_AT] == head, data
        assert len(list(file.parent.iterdir())) == 2, data

    def close() -> None:
        server.close()
        warehouse.close()

    wanted = RUN.pack(slab, generation, PAYLOAD_AT, 64)
    put = COUNT.pack(*PUT) + wanted + bytes(64)
    seeds = [COUNT.pack(1, 0) + wanted, COUNT.pack(2, 0) + 2 * wanted, put]
    return Target(run, [*seeds, COUNT.pack(0, 1) + SLAB.pack(slab, generation), b"".join(seeds)], close)


def connection(folder: Path) -> Target:
    """What a DockService makes of a connection's bytes: the greeting, the name, frames. The first byte says how far the
    other end keeps to the rules."""
    dock = make_dock(shared=True, root=folder)
    service = DockService(dock, [], secret=SECRET)

    def turn(stream: socket.socket, data: bytes) -> None:
        stream.sendall(data)
        for found in list(service._connections):
            service._turn(found, selectors.EVENT_READ)

    def run(data: bytes) -> None:
        rules, data = data[:1], data[1:MAX_BYTES]
        theirs, ours = socket.socketpair()
        with theirs:
            service._meet(ours)
            theirs.settimeout(1.0)
            nonce = receive(theirs, NONCE_BYTES)
            if rules and rules[0] % 4:
                turn(theirs, bytes(NONCE_BYTES) + proof(SECRET, b"client", nonce, bytes(NONCE_BYTES)))
            if rules and rules[0] % 4 > 1:
                turn(theirs, LENGTH.pack(2) + b"me")
            if service._connections:
                turn(theirs, LENGTH.pack(len(data)) + data if rules and rules[0] % 4 == 3 else data)
            service._try_parked(-1)
            assert 0.0 <= (service._timeout() or 0.0) <= MAX_WAIT_S
        for found in list(service._connections):
            service._drop(found)
        assert not service._connections
        assert not service._strangers
        assert not service._parked

    def close() -> None:
        service._stopping = True
        service.run()
        dock.close()

    framed = LENGTH.pack(len(STORY[0])) + STORY[0]
    seeds = [b"\x00" + bytes(64), b"\x01" + LENGTH.pack(2) + b"me" + framed, b"\x02" + framed + framed]
    return Target(run, [*seeds, *(b"\x03" + message for message in STORY)], close)


def messages(folder: Path) -> Target:
    """Any sequence of well-formed messages: the dock's books balance, and it fails at none of them.

    Each is 2 bytes of length, then that many bytes; its wait_s is time that passes before it. What only the run's own
    coordinator says is left out: it is trusted to say when a version begins, and to restore only what a dock has said.
    """

    def run(data: bytes) -> None:
        now = [0.0]
        dock = make_dock(shared=False, clock=lambda: now[0])
        host = DurableDock(lambda _clock, _adopt: dock, journalled=False)
        try:
            at = 0
            while at + 2 <= len(data):
                (length,) = struct.unpack_from("<H", data, at)
                body = data[at + 2 : at + 2 + length]
                at += 2 + length
                try:
                    found = decode_request(body)
                except ValueError:
                    continue
                if found.method in ("advance", "restore"):
                    continue
                now[0] += min(max(found.wait_s, 0.0), 10.0)
                answer = host.run("me", found.ticket, found, body, waiting=False)
                assert answer is not None
                assert b"in the dock: " not in answer, (answer, found)
                dock.ledger.check()
            now[0] += 10.0
            dock.expire()
            assert not len(dock._flow.leases)
            slabs = {slab.id: slab for one in dock.warehouse._all() for slab in one._slabs.values()}
            alive = dict.fromkeys(slabs, 0)
            for group in dock._flow.table.groups():
                for slab, rows in group.slabs.items():
                    alive[slab] += rows
            assert alive == {slab.id: slab.live for slab in slabs.values()}
        finally:
            dock.close()

    told = [struct.pack("<H", len(message)) + message for message in STORY]
    return Target(run, [b"".join(told), b"".join(told[:7]), *(b"".join(told[:4]) + one for one in told[4:])], cost=4)


TARGETS = {made.__name__: made for made in (request, reply, block, journal, runs, connection, messages)}
