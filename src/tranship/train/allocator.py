"""How the process keeps memory that training frees. Each update needs the same gigabytes again."""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed instead of giving it back to the system; False where there is no glibc.

    Activations and gradients are allocated anew at every update. By default most of them come as fresh pages, which
    the kernel must clear: up to a million page faults and a tenth of the time of an update. The peak stays the same,
    but between updates the process keeps it; memory freed by other parts of the process is reused for it too.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    # -1 is the largest threshold: never trim. Without mappings of their own, large blocks stay in the heap as well.
    return bool(libc.mallopt(_M_TRIM_THRESHOLD, -1)) and bool(libc.mallopt(_M_MMAP_MAX, 0))
