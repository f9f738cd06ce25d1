"""The payload for a client on another node: runs of slabs are received straight into kept memory, blocks are sent
straight into slabs (see `runs`)."""

from __future__ import annotations

import socket
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from tranship.dock.block import Block
from tranship.dock.errors import StaleSlab
from tranship.dock.frames import ConnectionLost, connect, receive_into, send, set_limit
from tranship.dock.messages import BlockRef
from tranship.dock.reader import Run
from tranship.dock.runs import COUNT, GOOD, MAX_RUNS, PUT, RUN, SLAB, SOCKET_BYTES

_CONNECT_S, _ANSWER_S = 10.0, 60.0
_BLOCKS_KEPT = 256
_HEAD_GUESS = 1 << 15


class _Fetched:
    """A block of which the first `have` bytes are here, in memory as large as the block: pages that nothing was
    received into cost nothing. block: parsed as far as it is here."""

    def __init__(self, nbytes: int) -> None:
        self.memory = np.empty(nbytes, np.uint8)
        self.have = 0
        self.block: Block | None = None


class RemoteReader:
    """Reads, and writes, the payload of another node through its RunServer. ConnectionLost if that is gone.

    Of blocks that nobody holds, the last 256 are kept.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self._address = address
        self._stream = connect(address, secret, _CONNECT_S)
        set_limit(self._stream, _ANSWER_S)
        self._stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
        self._kept: OrderedDict[BlockRef, _Fetched] = OrderedDict()

    def open(self, ref: BlockRef) -> Block:
        """A whole block, read-only. StaleSlab if its slab has been recycled."""
        fetched = self._entries([ref])[0]
        is_new = fetched.have < ref.nbytes
        self._extend([(ref, fetched, ref.nbytes)])
        self._check([ref])
        if is_new or fetched.block is None:
            fetched.block = Block.parse(fetched.memory.data)
        return fetched.block

    def heads(self, refs: Sequence[BlockRef]) -> list[Block]:
        """Blocks whose values may not be here; `read` finds out whether they were still there. Two messages at most,
        however many blocks they are."""
        found = self._entries(refs)
        wanted = {ref: fetched for ref, fetched in zip(refs, found, strict=True) if fetched.block is None}
        self._extend([(ref, fetched, min(ref.nbytes, _HEAD_GUESS)) for ref, fetched in wanted.items()])
        try:
            longer = []
            for ref, fetched in wanted.items():
                here = fetched.memory[: fetched.have].data
                longer.append((ref, fetched, Block.head_bytes(here, ref.nbytes)))
            self._extend(longer)
            for fetched in wanted.values():
                fetched.block = Block.parse(fetched.memory.data, head_only=True)
        except ValueError:
            for ref in wanted:
                del self._kept[ref]
            self._check(list(wanted))
            raise
        blocks = [fetched.block for fetched in found]
        return [block for block in blocks if block is not None]

    def read(self, runs: Sequence[Run], refs: Sequence[BlockRef]) -> None:
        """Receive each run; StaleSlab if a slab was recycled before all bytes were here."""
        missing = []
        for run in runs:
            kept = self._kept.get(run.ref)
            if kept is not None and run.offset + len(run.out) <= kept.have:
                np.copyto(run.out, kept.memory[run.offset : run.offset + len(run.out)])
            else:
                missing.append(run)
        self._fetch(missing)
        try:
            self._check(refs)
        except StaleSlab:
            for ref in refs:
                self._kept.pop(ref, None)
            raise

    def check(self, refs: Sequence[BlockRef]) -> None:
        """Nothing: a block is a copy, which was looked at when it had come."""

    def write(self, ref: BlockRef, block: memoryview) -> None:
        """Send a block to its place. StaleSlab if its slab has been recycled or taken away."""
        assert len(block) == ref.nbytes, (len(block), ref)
        run = RUN.pack(ref.slab, ref.generation, ref.offset, ref.nbytes)
        self._ask(COUNT.pack(*PUT) + run, [ref])
        self._ask(block, [ref])

    def close(self) -> None:
        """End the connection and forget the blocks."""
        self._kept.clear()
        self._stream.close()

    def _entries(self, refs: Sequence[BlockRef]) -> list[_Fetched]:
        found = []
        for ref in refs:
            if ref not in self._kept:
                self._kept[ref] = _Fetched(ref.nbytes)
            self._kept.move_to_end(ref)
            found.append(self._kept[ref])
        while len(self._kept) > _BLOCKS_KEPT:
            self._kept.popitem(last=False)
        return found

    def _extend(self, wanted: Sequence[tuple[BlockRef, _Fetched, int]]) -> None:
        """Have at least so many of the first bytes of some blocks here."""
        short = [(ref, fetched, length) for ref, fetched, length in wanted if fetched.have < length]
        self._fetch([Run(ref, fetched.have, fetched.memory[fetched.have : length]) for ref, fetched, length in short])
        for _, fetched, length in short:
            fetched.have = length

    def _fetch(self, runs: Sequence[Run]) -> None:
        for first in range(0, len(runs), MAX_RUNS):
            part = runs[first : first + MAX_RUNS]
            asked = [RUN.pack(ref.slab, ref.generation, ref.offset + at, len(out)) for ref, at, out in part]
            self._ask(COUNT.pack(len(part), 0) + b"".join(asked), [run.ref for run in part])
            for run in part:
                self._receive(run.out.data)

    def _check(self, refs: Sequence[BlockRef]) -> None:
        slabs = sorted({(ref.slab, ref.generation) for ref in refs})
        if slabs:
            self._ask(COUNT.pack(0, len(slabs)) + b"".join(SLAB.pack(*slab) for slab in slabs), refs)

    def _ask(self, request: bytes | memoryview, refs: Sequence[BlockRef]) -> None:
        answer = bytearray(1)
        try:
            send(self._stream, request)
        except OSError as error:
            raise ConnectionLost(f"the payload's server at {self._address} is gone: {error}") from error
        self._receive(memoryview(answer))
        if bytes(answer) != GOOD:
            raise StaleSlab(f"a slab has been recycled: of {[(ref.slab, ref.generation) for ref in refs][:4]}")

    def _receive(self, out: memoryview) -> None:
        try:
            receive_into(self._stream, out)
        except (OSError, ConnectionLost) as error:
            self._stream.close()
            raise ConnectionLost(f"the payload's server at {self._address} is gone: {error}") from error
