"""A slab: memory that blocks lie in, behind 64 bytes that say which slab it is and how often it has been recycled."""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from tranship.dock.block import ALIGNMENT
from tranship.dock.errors import StaleSlab
from tranship.dock.messages import BlockRef

_MAGIC = b"TSHPSLB\x01"
_HEADER = struct.Struct("<8sQQQ")
PAYLOAD_AT = ALIGNMENT
_NODE_SHIFT = 40


def node_of_slab(slab: int) -> int:
    """The number of the node whose warehouse a slab is in: slabs are numbered from `first_slab` of it on."""
    return slab >> _NODE_SHIFT


def first_slab(node: int) -> int:
    """The number of the first slab of a node (0: the dock's own)."""
    return (node << _NODE_SHIFT) + 1


def slab_path(folder: str | Path, slab: int) -> Path:
    """The file of a slab of a shared warehouse."""
    return Path(folder) / f"{slab}.slab"


def header(slab: int, generation: int, nbytes: int) -> bytes:
    """The first bytes of a slab."""
    return _HEADER.pack(_MAGIC, slab, generation, nbytes).ljust(ALIGNMENT, b"\0")


def block_bytes(memory: memoryview, ref: BlockRef) -> memoryview:
    """The bytes of a block, read-only. StaleSlab if the slab has moved on, ValueError if they do not lie in it."""
    check_generation(memory, ref.slab, ref.generation)
    if ref.offset < PAYLOAD_AT or ref.nbytes < 0 or ref.offset + ref.nbytes > len(memory):
        raise ValueError(f"block {ref} does not lie in a slab of {len(memory)} bytes")
    return memory[ref.offset : ref.offset + ref.nbytes].toreadonly()


def check_generation(memory: memoryview, slab: int, generation: int) -> None:
    """StaleSlab unless the memory is that slab, in that generation."""
    magic, found_slab, found, _ = _HEADER.unpack_from(memory)
    if magic != _MAGIC or found_slab != slab or found != generation:
        raise StaleSlab(f"slab {slab} has been recycled: generation {generation} was wanted, it has {found}")


def map_file(path: str | Path, *, writable: bool) -> memoryview:
    """The memory of a shared slab, all pages mapped now: one by one costs more. StaleSlab if its file is gone."""
    try:
        descriptor = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    except FileNotFoundError as error:
        raise StaleSlab(f"slab {Path(path).name} is gone from {Path(path).parent}") from error
    try:
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return memoryview(mmap.mmap(descriptor, 0, flags=flags, prot=protection))
    finally:
        os.close(descriptor)
