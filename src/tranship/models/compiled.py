"""Libraries of ours in C++: built once for a machine with the compiler that is there, and kept in the cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tranship.models.cache import build_once, cache_root
from tranship.types import UserError

_FLAGS = ["-std=c++17", "-O3", "-fPIC", "-shared"]


def compiled(sources: Path, flags: Sequence[str] = (), limit_s: float = 120.0) -> Path:
    """The library of the *.cpp files of a folder, built unless it is in the cache. flags: of the compiler, besides
    those that all have. limit_s: of building, and of waiting for another process that builds. Raises UserError where
    that cannot be done: no compiler, or one that refuses the sources."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise UserError(f"there is no C++ compiler {os.environ.get('CXX', 'g++')!r}: install g++, or set CXX")
    found = Path(compiler).resolve()
    texts = [path.read_bytes() for path in sorted(sources.iterdir())]
    state = [*texts, *_FLAGS, *flags, found, found.stat().st_mtime_ns, processor_flags()]
    name = hashlib.sha256(repr(state).encode()).hexdigest()[:16]

    def compile_into(folder: Path) -> None:
        _compile([compiler, *_FLAGS, *flags], sources, folder / "kernels.so", limit_s)

    return build_once(cache_root() / "kernels" / name, compile_into, limit_s) / "kernels.so"


def processor_flags() -> str:
    """What the processor can do, as Linux says; empty on another system."""
    said = Path("/proc/cpuinfo")
    lines = said.read_text().splitlines() if said.exists() else []
    return next((line for line in lines if line.startswith("flags")), "")


def _compile(command: list[str], sources: Path, library: Path, limit_s: float) -> None:
    files = sorted(map(str, sources.glob("*.cpp")))
    try:
        done = subprocess.run(
            [*command, *files, "-o", str(library)], capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f"{command[0]} did not build {sources} within {limit_s:.0f} s") from error
    except OSError as error:
        raise UserError(f"{command[0]} cannot be run: {error}: install g++, or set CXX") from error
    if done.returncode or not library.is_file():
        raise UserError(f"{command[0]} cannot build {sources}: {done.stderr.strip()[:500] or 'it made nothing'}")
