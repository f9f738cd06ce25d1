"""The process of a warehouse on another node than the dock's: it makes and removes the slabs' files there, and serves
their bytes to other nodes. It holds nothing that a successor could not find again: the files, and the dock's books."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

from tranship.dock.errors import StaleSlab
from tranship.dock.frames import ConnectionLost
from tranship.dock.link import DockLink
from tranship.dock.messages import Chore
from tranship.dock.runs import RunServer
from tranship.dock.shared_folder import JOURNAL, SharedFolder, default_root, sweep
from tranship.dock.slab import header, slab_path

_LONGEST_WAIT_S = 15.0


class Keeper:
    """Keeps a warehouse in a thread of its own, until it is closed or the dock is gone.

    address, secret: of the dock. node: the name of this node. host: the address that other nodes reach it by. lease_s:
    the dock's: it counts the node as lost when nothing is heard of the keeper for so long. run_id, root: see Warehouse.
    adopt: the folder of a keeper of this node that was killed. reconnect_s: see DockLink.
    """

    def __init__(
        self,
        address: str,
        secret: bytes,
        node: str,
        *,
        run_id: str,
        lease_s: float,
        host: str = "127.0.0.1",
        root: Path | None = None,
        adopt: Path | None = None,
        reconnect_s: float = 0.0,
    ) -> None:
        self._secret = secret
        self._node = node
        self._where = run_id, root or default_root(), host
        self._wait_s = min(_LONGEST_WAIT_S, lease_s / 3)
        self._closing = False
        self._link = DockLink(address, secret, f"warehouse/{node}", reconnect_s=reconnect_s)
        self._open(adopt)
        self._thread = threading.Thread(target=self._run, name="warehouse", daemon=True)
        self._thread.start()

    @property
    def folder(self) -> Path:
        """Where the slabs are."""
        return self._folder.path

    def close(self) -> None:
        """End, and remove the slabs. A second call does nothing."""
        self._closing = True
        self._link.close()
        self._thread.join()
        self._runs.close()
        self._folder.close()

    def _open(self, adopt: Path | None) -> None:
        run_id, root, host = self._where
        if adopt is None:
            sweep(root)
            self._folder = SharedFolder(run_id, root)
        else:
            self._folder = SharedFolder.adopt(adopt)
        self._stay()
        self._runs = RunServer(self._folder.path, f"tcp:{host}:0", secret=self._secret).start()
        self._number = self._link.call("open_warehouse", self._node, str(self._folder.path), self._runs.address)
        self._beat = 0
        self._done: list[tuple[int, str]] = []
        self._failed: Chore | None = None

    def _run(self) -> None:
        while not self._closing:
            try:
                self._step()
            except StaleSlab:
                # The dock has given this node up, while the process was held: nothing here is of use to anybody.
                self._runs.close()
                self._folder.close()
                self._open(None)
            except ConnectionLost:
                return

    def _step(self) -> None:
        self._stay()
        self._beat += 1
        chores = self._link.call("chores", self._number, self._beat, self._done, wait_s=self._wait_s)
        self._done = [(chore.slab, self._do(chore)) for chore in chores or ()]
        if not chores and self._failed is not None and self._has_room(self._failed.nbytes):
            # Others have freed some memory of the node: the dock asks again for what could not be made.
            self._done = [(self._failed.slab, "")]
            self._failed = None

    def _has_room(self, nbytes: int) -> bool:
        found = os.statvfs(self._folder.path)
        return found.f_bavail * found.f_frsize >= nbytes

    def _stay(self) -> None:
        """Another process that sweeps leaves this folder to a successor for a while, if this one is killed."""
        with suppress(OSError):
            (self._folder.path / JOURNAL).touch()

    def _do(self, chore: Chore) -> str:
        """Make or remove a slab's file; returns why it could not be made."""
        if chore.nbytes:
            error = self._make(chore)
            self._failed = chore if error else None
            return error
        with suppress(OSError):
            slab_path(self._folder.path, chore.slab).unlink(missing_ok=True)
        return ""

    def _make(self, chore: Chore) -> str:
        path = slab_path(self._folder.path, chore.slab)
        descriptor = -1
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, chore.nbytes)
            else:
                os.truncate(descriptor, chore.nbytes)
            os.pwrite(descriptor, header(chore.slab, 1, chore.nbytes), 0)
        except OSError as error:
            path.unlink(missing_ok=True)
            where = f"{path.parent.parent} on node {self._node}"
            return f"{where} has no room for {chore.nbytes} bytes more ({error.strerror})"
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return ""
