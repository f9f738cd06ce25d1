"""What a figure was measured on: the machine and the versions of the packages that matter."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = (
    "tranship", "torch", "transformers", "safetensors", "numpy", "pydantic", "pyarrow", "ray", "msgpack", "tensorboard"
)  # fmt: skip


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, memory in bytes, system. Values are strings and integers."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    return {
        "processor": _processor(),
        "cores": cores,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
    }


def versions(packages: tuple[str, ...] = _PACKAGES) -> dict[str, str]:
    """Python's version and those of installed packages; packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def rss_bytes(pids: tuple[int, ...] | None = None) -> int:
    """Resident bytes of the processes (None: this one), pages that they share counted in each; 0 for ended ones.

    Where /proc does not exist, 0.
    """
    total = 0
    for pid in pids or (os.getpid(),):
        try:
            fields = Path(f"/proc/{pid}/statm").read_text().split()
        except OSError:
            continue
        total += int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
