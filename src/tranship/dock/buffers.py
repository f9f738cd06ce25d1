"""Memory that a reader keeps from one batch to the next: fresh pages cost more than the copy into them."""

from __future__ import annotations

import mmap

import numpy as np

_GROWTH = 1.25


class Buffers:
    """Kept memory by name. What was taken under a name is written over when the name is taken again."""

    def __init__(self) -> None:
        self._kept: dict[str, np.ndarray] = {}

    def take(self, name: str, dtype: np.dtype, count: int) -> np.ndarray:
        """`count` items of a dtype, of any content."""
        nbytes = count * dtype.itemsize
        kept = self._kept.get(name)
        if kept is None or len(kept) < nbytes:
            kept = np.frombuffer(_huge(max(mmap.PAGESIZE, int(nbytes * _GROWTH))), np.uint8)
            self._kept[name] = kept
        return kept[:nbytes].view(dtype)

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        return sum(len(kept) for kept in self._kept.values())


def _huge(nbytes: int) -> mmap.mmap:
    """Fresh memory, in huge pages where the system gives them."""
    memory = mmap.mmap(-1, nbytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
