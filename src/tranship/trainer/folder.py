"""The run's folder: one run at a time, an earlier run's files never overwritten."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from tranship.types import UserError


class RunFolder:
    """Holds RUN/.lock while the run lives. Raises UserError where another run holds it or it cannot be written.

    Without `resume`, a folder that holds an earlier run is set aside as RUN.1, RUN.2, ...: `set_aside` says where.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        self.set_aside: Path | None = None
        self._descriptor = self._lock()
        if not resume and _has_run(path):
            os.close(self._descriptor)
            self.set_aside = _free_name(path)
            path.rename(self.set_aside)
            self._descriptor = self._lock()

    def _lock(self) -> int:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"run.dir {self.path} cannot be written: {error.strerror}: choose another") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise UserError(
                f"run.dir {self.path} is in use by another run (process {owner}): wait for it, or choose another"
            ) from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return descriptor

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)


def _has_run(path: Path) -> bool:
    return any((path / name).exists() for name in ("metrics.jsonl", "checkpoints", "summary.json", "config.yaml"))


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    return candidate
