"""A process's view of the payload: maps each slab once, parses each block once, and never trusts a recycled one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from tranship.dock.block import Block
from tranship.dock.messages import BlockRef
from tranship.dock.slab import block_bytes, check_generation, map_file, slab_path

_SLABS_KEPT = 256
_BLOCKS_KEPT = 1024


class Run(NamedTuple):
    """Bytes to be read: from `offset` in a block, as many as fit into `out` (uint8)."""

    ref: BlockRef
    offset: int
    out: np.ndarray


class BlockReader(Protocol):
    """Blocks by reference, wherever they lie. StaleSlab if a slab has been recycled."""

    def open(self, ref: BlockRef) -> Block:
        """A block, read-only."""
        ...

    def heads(self, refs: Sequence[BlockRef]) -> list[Block]:
        """Blocks of which the values may not be here yet: only where they lie may be asked."""
        ...

    def read(self, runs: Sequence[Run], refs: Sequence[BlockRef]) -> None:
        """Fill the runs, which lie in the blocks `refs`, with the bytes of these blocks; else raise StaleSlab."""
        ...

    def check(self, refs: Sequence[BlockRef]) -> None:
        """StaleSlab if memory of these blocks that `open` gave holds something else by now."""
        ...

    def close(self) -> None:
        """Forget everything; values that are still in use keep their memory."""
        ...


class LocalReader:
    """Maps the slabs of this node. call reaches the dock; only where the payload is memory of this process it is asked
    for it. folder: of the slabs (None: the dock is asked). A block that nobody holds any more may be forgotten and is
    then parsed again.
    """

    def __init__(self, call: Callable[..., Any], folder: str | None = None) -> None:
        self._call = call
        self._folder: str | None = folder or call("payload_folder")
        self._slabs: OrderedDict[int, memoryview] = OrderedDict()
        self._blocks: OrderedDict[BlockRef, Block] = OrderedDict()

    def open(self, ref: BlockRef) -> Block:
        """A block, read-only, without a copy. StaleSlab if its slab has been recycled."""
        memory = self._memory(ref.slab)
        block = self._blocks.get(ref)
        if block is None:
            block = Block.parse(block_bytes(memory, ref))
            self._blocks[ref] = block
            if len(self._blocks) > _BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        else:
            check_generation(memory, ref.slab, ref.generation)
        return block

    def heads(self, refs: Sequence[BlockRef]) -> list[Block]:
        """The blocks."""
        return [self.open(ref) for ref in refs]

    def read(self, runs: Sequence[Run], refs: Sequence[BlockRef]) -> None:
        """Copy each run; StaleSlab if a slab was recycled before the end."""
        for ref, offset, out in runs:
            start = ref.offset + offset
            source = np.frombuffer(self._memory(ref.slab)[start : start + len(out)], np.uint8)
            np.copyto(out, source)
        self.check(refs)

    def check(self, refs: Sequence[BlockRef]) -> None:
        """StaleSlab if one of the blocks is not where it was any more."""
        for slab, generation in {(ref.slab, ref.generation) for ref in refs}:
            check_generation(self._memory(slab), slab, generation)

    def close(self) -> None:
        """Forget all mappings; values that are still in use keep theirs."""
        self._blocks.clear()
        self._slabs.clear()

    def _memory(self, slab: int) -> memoryview:
        memory = self._slabs.get(slab)
        if memory is None:
            if self._folder is None:
                memory = self._call("map_slab", slab)
                assert isinstance(memory, memoryview)
            else:
                memory = map_file(slab_path(self._folder, slab), writable=False)
            self._slabs[slab] = memory
            if len(self._slabs) > _SLABS_KEPT:
                self._slabs.popitem(last=False)
        return memory
