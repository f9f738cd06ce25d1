"""Writes blocks into the slab that its owner has on lease, one behind the other: no message for each block."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tranship.dock.block import PackedBlock
from tranship.dock.buffers import Buffers
from tranship.dock.errors import DockFull
from tranship.dock.messages import HOME, BlockRef, SlabLease
from tranship.dock.slab import PAYLOAD_AT, header, map_file


class BlockWriter:
    """The writing side of one owner. wait_s: how long the dock may keep a request for room until there is some;
    0: `call` takes no wait_s, and without room a write fails at once. node: the number of the node whose slabs it
    writes into. send: brings a block to a slab on another node (None: the slab is mapped here)."""

    def __init__(
        self,
        call: Callable[..., Any],
        owner: str,
        *,
        wait_s: float,
        node: int = HOME,
        send: Callable[[BlockRef, memoryview], None] | None = None,
    ) -> None:
        self._call = call
        self._owner = owner
        self._wait_s = wait_s
        self._node = {} if node == HOME else {"node": node}
        self._send = send
        self._buffers = Buffers()
        self._lease: SlabLease | None = None
        self._memory = memoryview(b"")
        self._mapped: dict[int, memoryview] = {}
        self._next = PAYLOAD_AT

    def write(self, block: PackedBlock) -> BlockRef:
        """Copy a block into the slab; returns where it lies. DockFull if there is no room within the limit."""
        if self._lease is None or self._next + block.nbytes > self._lease.nbytes:
            self._lease_slab(block.nbytes)
        assert self._lease is not None
        ref = BlockRef(self._lease.slab, self._lease.generation, self._next, block.nbytes)
        if self._send is None:
            block.write_into(self._memory[ref.offset : ref.offset + ref.nbytes], generation=ref.generation)
        else:
            made = self._buffers.take("block", np.dtype(np.uint8), block.nbytes).data
            block.write_into(made, generation=ref.generation)
            self._send(ref, made)
        self._next += block.nbytes
        return ref

    def take_back(self, ref: BlockRef) -> None:
        """The dock refused the last block: its room is used again."""
        if self._lease is not None and ref.slab == self._lease.slab and ref.offset + ref.nbytes == self._next:
            self._next = ref.offset

    def forget(self) -> None:
        """The slab was taken away: nothing more is written into it."""
        if self._lease is not None:
            self._mapped.pop(self._lease.slab, None)
        self._lease = None

    def _lease_slab(self, nbytes: int) -> None:
        giving_up = None if self._lease is None else self._lease.slab
        self._lease = None
        start = time.monotonic()
        parking = {"wait_s": self._wait_s} if self._wait_s else {}
        lease = self._call("lease_slab", self._owner, nbytes, giving_up, **self._node, **parking)
        if lease is None:
            raise DockFull(self._full_text(nbytes, time.monotonic() - start))
        self._memory = self._map(lease) if self._send is None else memoryview(b"")
        self._lease = lease
        self._next = PAYLOAD_AT

    def _map(self, lease: SlabLease) -> memoryview:
        if lease.path is None:
            return self._call("map_slab", lease.slab)
        if lease.slab not in self._mapped:
            if len(self._mapped) > 64:
                self._mapped.clear()
            self._mapped[lease.slab] = map_file(lease.path, writable=True)
        memory = self._mapped[lease.slab]
        # Before anything else is written, a late reader of what lay here finds out.
        head = header(lease.slab, lease.generation, lease.nbytes)
        memory[: len(head)] = head
        return memory

    def _full_text(self, nbytes: int, waited: float) -> str:
        use = self._call("memory_use", **self._node)
        return (
            f"{self._owner} waited {waited:.1f} s for room for {nbytes} bytes in the dock: {use.refusal}; "
            "raise dock.capacity_bytes, or lower dock.slab_bytes, train.batch_size or dock.staleness"
        )
