"""One consistent cut on disk: written under a temporary name, verified, renamed, and only then pointed to.

RUN/checkpoints/step-000010/   trainer/  weights, optimizer, schedule, random state
                               model/    a Hugging Face folder
                               state.json    version, position in the data, ledger, groups in flight
                               manifest.json size and digest of every file
RUN/checkpoints/latest         the name of the newest complete one
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError

from tranship.types import RunError, UserError

_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class Cut:
    """A verified checkpoint: its folder and the coordinator's state in it."""

    folder: Path
    state: Mapping[str, Any]


def write_cut(
    run_dir: Path, step: int, *, save: Callable[[Path], None], state: Mapping[str, Any], keep_last: int
) -> Path:
    """Write checkpoint `step`, move the pointer to it, and delete all but `keep_last`: it and those before it.

    save(folder) writes the trainer's part. If the disk is full or a file cannot be written, what was begun is removed,
    the pointer stays, and RunError says which checkpoint is the last good one.
    """
    root = run_dir / "checkpoints"
    final = root / f"step-{step:06d}"
    temporary = root / f".{final.name}.part"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save(temporary)
        _write_text(temporary / "state.json", json.dumps(state))
        manifest = {str(path.relative_to(temporary)): _describe(path) for path in _files(temporary)}
        _write_text(temporary / "manifest.json", json.dumps(manifest, indent=1))
        _sync(temporary)
        _verify(temporary)
        if final.exists():
            shutil.rmtree(final)
        temporary.rename(final)
        _point_to(root, final.name)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        last = _pointer(root)
        kept = f"the last good checkpoint is {root / last}" if last else "there is no earlier checkpoint"
        raise RunError(f"checkpoint of step {step} could not be written to {root}: {error}; {kept}") from error
    _prune(root, final.name, keep_last)
    return final


def read_latest(run_dir: Path) -> Cut | None:
    """The newest checkpoint, verified; None if there is none. UserError if it is damaged, naming the file.

    Where the pointer to it is missing or empty (a kill between the two), it is the newest that is whole.
    """
    root = run_dir / "checkpoints"
    name = _pointer(root) or _newest_whole(root)
    if name is None:
        return None
    folder = root / name
    try:
        _verify(folder)
        state = json.loads((folder / "state.json").read_text())
    except (OSError, ValueError) as error:
        others = sorted(path.name for path in root.glob("step-*") if path.name != name)
        remedy = f"write {others[-1]!r} into {root / 'latest'}" if others else "start the run again in another run.dir"
        raise UserError(f"checkpoint {folder} is damaged ({error}): to go on without it, {remedy}") from error
    return Cut(folder, state)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json")


def _describe(path: Path) -> list[Any]:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return [path.stat().st_size, digest.hexdigest()]


def _verify(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    present = {str(path.relative_to(folder)) for path in _files(folder)}
    if missing := sorted(set(manifest) - present):
        raise ValueError(f"{missing[0]} is missing")
    for name, expected in manifest.items():
        size = (folder / name).stat().st_size
        if size != expected[0]:
            raise ValueError(f"{name} has {size} bytes and should have {expected[0]}")
        if _describe(folder / name) != expected:
            raise ValueError(f"{name} has changed since it was written")


def _write_text(path: Path, text: str) -> None:
    path.write_text(text)


def _newest_whole(root: Path) -> str | None:
    """The newest checkpoint that verifies; None if there are none at all. UserError if all of them are damaged."""
    found = sorted((path.name for path in root.glob("step-*")), reverse=True)
    for name in found:
        try:
            _verify(root / name)
        except (OSError, ValueError):
            continue
        return name
    if found:
        raise UserError(
            f"{root / 'latest'} names no checkpoint, and none of {', '.join(found)} is whole: start the run again in "
            "another run.dir"
        )
    return None


def _sync(folder: Path) -> None:
    for path in [*_files(folder), folder / "manifest.json", folder]:
        _sync_one(path)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _point_to(root: Path, name: str) -> None:
    temporary = root / "latest.part"
    _write_text(temporary, name)
    _sync_one(temporary)
    temporary.replace(root / "latest")
    _sync_one(root)


def _pointer(root: Path) -> str | None:
    try:
        return (root / "latest").read_text().strip() or None
    except OSError:
        return None


def _prune(root: Path, newest: str, keep_last: int) -> None:
    """Delete all but `newest` and those before it that are to be kept. Later ones are of a run that was given up."""
    names = sorted(path.name for path in root.glob("step-*"))
    kept = [name for name in names if name <= newest][-keep_last:]
    for name in names:
        if name not in kept:
            shutil.rmtree(root / name, ignore_errors=True)
