"""The folder of a shared warehouse: `tranship-<run id>-<pid>`, held by a lock as long as its process lives.

What dead processes left is swept by the next one. A folder counts as left over only if its process is gone and nobody
holds its lock, which also holds between containers that share the memory but not the process ids.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

from tranship.types import UserError

_PREFIX = "tranship-"
_LOCK = "lock"
JOURNAL = "journal"
_SUCCESSOR_S = 60.0


def default_root() -> Path:
    """Where memory can be shared by name: /dev/shm, or the folder for temporary files where there is none."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() else Path(tempfile.gettempdir())


class SharedFolder:
    """A folder of this process, private to this user. Characters that do not belong into a name are replaced."""

    def __init__(self, run_id: str, root: Path) -> None:
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", run_id)[:64]
        self._hold(_make_folder(root, name))

    @classmethod
    def adopt(cls, path: Path) -> SharedFolder:
        """The folder of a process that was killed. UserError if it is gone, or its process holds it."""
        if not path.is_dir() or _is_locked(path / _LOCK):
            raise UserError(f"{path} cannot be taken over: it is gone, or the process that made it lives")
        folder = cls.__new__(cls)
        folder._hold(path)
        return folder

    def _hold(self, path: Path) -> None:
        self.path = path
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def close(self) -> None:
        """Remove the folder. A second call does nothing."""
        if self._lock < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1


def left_by(run_id: str, root: Path) -> Path | None:
    """The folder that a dead process of this run left; the newest, if there are several. None if there is none."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", run_id)[:64]
    found = [path for path in root.glob(f"{_PREFIX}{name}*-*") if path.is_dir() and not _is_locked(path / _LOCK)]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _make_folder(root: Path, name: str) -> Path:
    """A new folder; a number is added to its name where this process has one of that name already."""
    for number in range(1000):
        path = root / f"{_PREFIX}{name}{f'.{number}' if number else ''}-{os.getpid()}"
        try:
            path.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return path
    raise UserError(f"{root} holds 1000 folders of process {os.getpid()} for run {name!r}: remove them")


def sweep(root: Path) -> list[str]:
    """Remove the folders that dead processes of this user left; returns their names. One with a journal stays for a
    minute after its last entry: a successor may be on its way."""
    removed = []
    for folder in root.glob(f"{_PREFIX}*-*"):
        pid = folder.name.rpartition("-")[2]
        if not pid.isdigit() or folder.is_symlink() or not folder.is_dir():
            continue
        try:
            if folder.stat().st_uid != os.getuid() or _process_lives(int(pid)) or _is_locked(folder / _LOCK):
                continue
            journal = folder / JOURNAL
            if journal.exists() and time.time() - journal.stat().st_mtime < _SUCCESSOR_S:
                continue
        except FileNotFoundError:
            continue
        shutil.rmtree(folder, ignore_errors=True)
        removed.append(folder.name)
    return removed


def _process_lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
