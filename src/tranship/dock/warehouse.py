"""The payload plane of one node: slabs, leased to those who write, recycled when nothing in them is alive.

It never looks at payload. A writer fills its slab from the front and asks for another when it is full. A slab that is
sealed and holds no live row becomes free: its generation goes up, so that a late reader finds out.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tranship.dock.block import align
from tranship.dock.errors import DockFull, StaleSlab
from tranship.dock.messages import BlockRef, MemoryUse, SlabLease
from tranship.dock.shared_folder import SharedFolder, default_root, sweep
from tranship.dock.slab import PAYLOAD_AT, header, slab_path


@dataclass
class Slab:
    """The record of a slab. making: its file is not there yet."""

    id: int
    nbytes: int
    owner: str
    memory: memoryview | None
    generation: int = 1
    state: Literal["making", "open", "sealed", "free"] = "open"
    live: int = 0
    # Taken from an owner that may still write into it: these pages are never given to anybody else.
    abandoned: bool = False


class LeaseOutcome(NamedTuple):
    """How the last slab was found, for a successor that does it again. sealed: the owner's slab before it. removed:
    free ones that made room. slab: the leased one, 0 if there was none; created: it is new, of nbytes bytes."""

    sealed: int
    removed: list[int]
    slab: int
    created: bool
    nbytes: int


class Warehouse:
    """Slabs of one run. shared: files that other processes of this machine map; else memory of this process.

    slab_bytes: usual size of a slab. capacity_bytes: of all of them together. root: where the files are (/dev/shm).
    adopt: the folder of a predecessor that was killed; what it did is repeated, without touching its files, until
    `settle`. prefault: how many slabs are made at the start, so that the first writers do not wait for fresh pages.
    first: the number of the first slab.
    """

    def __init__(
        self,
        run_id: str,
        slab_bytes: int,
        capacity_bytes: int,
        shared: bool,
        *,
        root: Path | None = None,
        adopt: Path | None = None,
        prefault: int = 0,
        first: int = 1,
    ) -> None:
        self._slab_bytes = align(slab_bytes)
        self._capacity = capacity_bytes
        self._slabs: dict[int, Slab] = {}
        self._open: dict[str, int] = {}
        self._next = first
        self._held = 0
        self._refusal = ""
        self._removed: list[int] = []
        self._folder: SharedFolder | None = None
        self._repeats = adopt is not None
        self.last_lease = LeaseOutcome(0, [], 0, False, 0)
        if adopt is not None:
            self._folder = SharedFolder.adopt(adopt)
        elif shared:
            root = root or default_root()
            sweep(root)
            self._folder = SharedFolder(run_id, root)

        if adopt is None:
            self._prefault(min(prefault, capacity_bytes // self._slab_bytes))

    @property
    def folder(self) -> str | None:
        """Where the slabs' files are; None if they are memory of this process."""
        return str(self._folder.path) if self._folder else None

    def lease_slab(self, owner: str, min_bytes: int, giving_up: int | None = None) -> SlabLease | None:
        """A slab with room for a block of min_bytes, or None if there is none now.

        giving_up: the slab that the owner has filled and will not write to any more; if it has another one, that one
        was its predecessor's, who may still be alive somewhere. DockFull if waiting cannot help.
        """
        nbytes = max(self._slab_bytes, PAYLOAD_AT + align(min_bytes))
        if nbytes > self._capacity:
            raise DockFull(
                f"{owner} wants to put {min_bytes} bytes at once, and dock.capacity_bytes is {self._capacity}: raise it"
            )
        # Whole multiples of the usual size, so that blocks of about one size are served by the same slabs again.
        nbytes = min(self._capacity, -(-nbytes // self._slab_bytes) * self._slab_bytes)
        sealed = self._open.get(owner, 0)
        self._removed = []
        self._give_up(owner, giving_up)
        reused = self._reuse(owner, nbytes)
        slab = reused or self._create(owner, nbytes)
        found = (0, False) if slab is None else (slab.id, reused is None)
        self.last_lease = LeaseOutcome(sealed, self._removed, *found, nbytes)
        return None if slab is None else self._lease_out(slab, owner)

    def repeat_lease(self, owner: str, giving_up: int | None, outcome: LeaseOutcome) -> None:
        """Do again what `lease_slab` did in a predecessor."""
        self._give_up(owner, giving_up)
        for slab in outcome.removed:
            self._remove(self._slabs[slab])
        if not outcome.slab:
            return
        if outcome.created:
            self._slabs[outcome.slab] = Slab(outcome.slab, outcome.nbytes, owner, None)
            self._next = outcome.slab + 1
            self._held += outcome.nbytes
        self._lease_out(self._slabs[outcome.slab], owner)

    def settle(self) -> list[int]:
        """All of a predecessor's doings have been repeated: from now on its files are this one's. Returns the ids of
        free slabs whose files are gone, which are forgotten; files of slabs that nobody knows are removed."""
        assert self._folder is not None
        self._repeats = False
        there = {int(path.stem) for path in self._folder.path.glob("*.slab")}
        lost = [slab.id for slab in self._slabs.values() if slab.id not in there]
        self.lose(lost)
        for slab in self._slabs.values():
            self._write_header(slab)
        for slab in there - self._slabs.keys():
            slab_path(self._folder.path, slab).unlink()
        return lost

    def lose(self, slabs: Sequence[int]) -> None:
        """Forget free slabs whose files are gone."""
        for slab in slabs:
            entry = self._slabs.pop(slab)
            assert not entry.live, f"the file of slab {slab} is gone, and {entry.live} rows were in it"
            self._held -= entry.nbytes

    def snapshot(self) -> list[Any]:
        """The slabs as plain values, for `restore`."""
        slabs = self._slabs.values()
        return [self._next, [[s.id, s.nbytes, s.owner, s.generation, s.state, s.live, s.abandoned] for s in slabs]]

    def restore(self, snapshot: Sequence[Any]) -> None:
        """Go on from a snapshot, with a predecessor's files."""
        assert not self._slabs, "a warehouse in use cannot be restored"
        self._next, slabs = snapshot
        for slab_id, nbytes, owner, generation, state, live, abandoned in slabs:
            self._slabs[slab_id] = Slab(slab_id, nbytes, owner, None, generation, state, live, abandoned)
            self._held += nbytes
            if state == "open":
                self._open[owner] = slab_id

    def free_slabs(self) -> list[int]:
        """The slabs that hold nothing and that nobody writes into."""
        return [slab.id for slab in self._free()]

    def give_back(self, slabs: Sequence[int]) -> None:
        """The memory of these free slabs goes back to the system."""
        for slab in slabs:
            self._remove(self._slabs[slab])

    def seal(self, owner: str) -> None:
        """The owner is gone: what it published stays, and what it still writes reaches nobody."""
        if owner in self._open:
            self._seal(self._slabs[self._open[owner]], abandoned=True)

    def check_block(self, ref: BlockRef, owner: str | None = None) -> None:
        """StaleSlab unless a block lies in a slab that is being written (by `owner`, if that is given)."""
        slab = self._slabs.get(ref.slab)
        if slab is None or slab.state != "open" or slab.generation != ref.generation:
            raise StaleSlab(f"slab {ref.slab} of generation {ref.generation} is not on lease any more")
        if owner is not None and slab.owner != owner:
            raise StaleSlab(f"slab {ref.slab} is on lease to {slab.owner}, not to {owner}")
        if ref.offset < PAYLOAD_AT or ref.nbytes <= 0 or ref.offset + ref.nbytes > slab.nbytes:
            raise ValueError(f"block {ref} does not lie in a slab of {slab.nbytes} bytes")

    def retain(self, slab: int, rows: int) -> None:
        """So many more live rows lie in a slab."""
        self._slabs[slab].live += rows

    def release(self, slab: int, rows: int) -> None:
        """So many rows of a slab are dead."""
        entry = self._slabs[slab]
        entry.live -= rows
        assert entry.live >= 0, f"slab {slab} lost more rows than it had"
        self._recycle(entry)

    def memory(self, slab: int) -> memoryview:
        """The memory of a slab of this process. StaleSlab if it is gone."""
        entry = self._slabs.get(slab)
        if entry is None or entry.memory is None:
            raise StaleSlab(f"slab {slab} is gone")
        return entry.memory

    def path(self, slab: int) -> str | None:
        """The file of a slab; None if it is memory of this process."""
        return str(slab_path(self._folder.path, slab)) if self._folder else None

    def use(self) -> MemoryUse:
        """How full it is, and why the last slab was refused."""
        busy = sum(slab.nbytes for slab in self._slabs.values() if slab.state != "free")
        return MemoryUse(self._held, busy, self._capacity, self._refusal)

    def close(self) -> None:
        """Remove everything. A second call does nothing."""
        self._slabs.clear()
        self._open.clear()
        self._held = 0
        if self._folder:
            self._folder.close()

    def _prefault(self, count: int) -> None:
        """Make free slabs of the usual size, as many as the machine has room for."""
        made = [self._create("", self._slab_bytes) for _ in range(count)]
        for slab in made:
            if slab is not None:
                slab.state = "free"

    def _give_up(self, owner: str, giving_up: int | None) -> None:
        """Seal the owner's slab, if it has one; it is abandoned unless the owner itself gives it up."""
        if owner in self._open:
            self._seal(self._slabs[self._open[owner]], abandoned=self._open[owner] != giving_up)

    def _lease_out(self, slab: Slab, owner: str) -> SlabLease:
        slab.owner, slab.state = owner, "open"
        self._open[owner] = slab.id
        return SlabLease(slab.id, slab.generation, self.path(slab.id), slab.nbytes)

    def _make_room(self, slab: Slab) -> None:
        """Remove a free slab for another one."""
        self._removed.append(slab.id)
        self._remove(slab)

    def _seal(self, slab: Slab, *, abandoned: bool) -> None:
        del self._open[slab.owner]
        slab.state = "sealed"
        slab.abandoned = abandoned
        self._recycle(slab)

    def _recycle(self, slab: Slab) -> None:
        if slab.live or slab.state != "sealed":
            return
        if slab.abandoned:
            self._remove(slab)
            return
        slab.state = "free"
        slab.generation += 1
        self._write_header(slab)

    def _free(self) -> Iterator[Slab]:
        return (slab for slab in self._slabs.values() if slab.state == "free")

    def _reuse(self, owner: str, nbytes: int) -> Slab | None:
        """A free slab that is large enough: one that the owner had first, since its pages are mapped there, and none
        that is larger than need be."""
        fitting = (slab for slab in self._free() if slab.nbytes >= nbytes)
        return min(fitting, key=lambda slab: (slab.owner != owner, slab.nbytes, slab.id), default=None)

    def _create(self, owner: str, nbytes: int) -> Slab | None:
        for slab in list(self._free()):
            if self._held + nbytes <= self._capacity:
                break
            self._make_room(slab)
        if self._held + nbytes > self._capacity:
            self._refusal = f"{self._held} of {self._capacity} bytes (dock.capacity_bytes) are in use"
            return None
        slab = Slab(self._next, nbytes, owner, None)
        if self._folder:
            if not self._create_file(slab):
                for free in list(self._free()):
                    self._make_room(free)
                if not self._create_file(slab):
                    return None
        else:
            slab.memory = memoryview(mmap.mmap(-1, nbytes))
        self._next += 1
        self._slabs[slab.id] = slab
        self._held += nbytes
        self._write_header(slab)
        return slab

    def _create_file(self, slab: Slab) -> bool:
        """Whether the memory of a slab's file could be set aside now; later, a lack of it would kill the writer."""
        assert self._folder is not None
        path = slab_path(self._folder.path, slab.id)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, slab.nbytes)
            else:
                os.truncate(descriptor, slab.nbytes)
        except OSError as error:
            path.unlink()
            self._refusal = f"{self._folder.path.parent} has no room for {slab.nbytes} bytes more ({error.strerror})"
            if not self._slabs:
                raise DockFull(f"{self._refusal}: free some, or lower dock.slab_bytes") from error
            return False
        finally:
            os.close(descriptor)
        return True

    def _write_header(self, slab: Slab) -> None:
        if self._repeats:
            return
        data = header(slab.id, slab.generation, slab.nbytes)
        if slab.memory is not None:
            slab.memory[: len(data)] = data
            return
        assert self._folder is not None
        descriptor = os.open(slab_path(self._folder.path, slab.id), os.O_WRONLY)
        try:
            os.pwrite(descriptor, data, 0)
        finally:
            os.close(descriptor)

    def _remove(self, slab: Slab) -> None:
        slab.generation += 1
        self._write_header(slab)
        del self._slabs[slab.id]
        self._held -= slab.nbytes
        if self._folder and not self._repeats:
            slab_path(self._folder.path, slab.id).unlink(missing_ok=True)
