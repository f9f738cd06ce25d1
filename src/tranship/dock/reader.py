"""A process's view of the payload: maps each slab once, parses each block once, and never trusts a recycled one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from tranship.dock.block import Block
from tranship.dock.messages import BlockRef
from tranship.dock.slab import block_bytes, check_generation, map_file, slab_path

_SLABS_KEPT = 256
_BLOCKS_KEPT = 1024


class BlockReader:
    """Blocks by reference. call reaches the dock; only where the payload is memory of this process it is asked for it.

    A block that nobody holds any more may be forgotten and is then parsed again.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._folder: str | None = call("payload_folder")
        self._slabs: OrderedDict[int, memoryview] = OrderedDict()
        self._blocks: OrderedDict[BlockRef, Block] = OrderedDict()

    @property
    def is_shared(self) -> bool:
        """Whether the payload is shared between processes."""
        return self._folder is not None

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
