"""Where fetched models lie, and how a folder gets there whole: built under another name, then renamed, under a lock."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tranship.types import UserError

LOCK_TIMEOUT_S = 900.0


def cache_root() -> Path:
    """Where fetched things lie: `$TRANSHIP_CACHE`, `$XDG_CACHE_HOME/tranship` or `~/.cache/tranship`. UserError for a
    user without a home folder."""
    own, shared = os.environ.get("TRANSHIP_CACHE"), os.environ.get("XDG_CACHE_HOME")
    try:
        if own:
            return Path(own).expanduser()
        return (Path(shared).expanduser() if shared else Path.home() / ".cache") / "tranship"
    except RuntimeError as error:
        raise UserError(f"the cache has no folder: {error} Set TRANSHIP_CACHE to one that can be written") from error


def model_folder(name: str, cache: Path | None = None) -> Path:
    """The folder of the catalog's model `name`, whether it is there or not."""
    return (cache or cache_root()) / "models" / name


def build_once(folder: Path, build: Callable[[Path], None], timeout_s: float = LOCK_TIMEOUT_S) -> Path:
    """`folder`, made by `build(temporary folder)` unless it stands; it appears whole or not at all.

    Safe among threads and processes of one machine: one builds, the others wait for it up to `timeout_s`. Raises
    UserError where the cache cannot be written or the wait is over.
    """
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.parent / f".{folder.name}.lock", timeout_s):
            if not folder.is_dir():
                _build_and_rename(folder, build)
    except OSError as error:
        raise UserError(
            f"the folder {folder} cannot be made: {error}: free some space, or set TRANSHIP_CACHE to a folder "
            "that can be written"
        ) from error
    return folder


def _build_and_rename(folder: Path, build: Callable[[Path], None]) -> None:
    """Called under the lock, so that whatever lies there under a temporary name was left by a killed process."""
    for left_over in folder.parent.glob(f".{folder.name}.*/"):
        shutil.rmtree(left_over, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        build(temporary)
        temporary.chmod(0o755)
        for file in temporary.iterdir():
            file.chmod(0o644)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextmanager
def _locked(path: Path, timeout_s: float) -> Iterator[None]:
    deadline = time.monotonic() + timeout_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"waited {timeout_s:.0f} s for another process that holds {path}: end it, then try again"
                    ) from None
                time.sleep(0.05)
        yield
