"""A dock with all that other processes need to reach it: its service, and the server of its payload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tranship.dock.access import DockAccess
from tranship.dock.dock import Dock
from tranship.dock.durable import Clock, DurableDock
from tranship.dock.frames import check_secret, new_secret
from tranship.dock.place import Place
from tranship.dock.runs import RunServer
from tranship.dock.service import DockService

_SOCKET = "socket"


class ServedDock:
    """Serves from now on, in threads of its own, until it is closed.

    make_dock(clock, adopt): a dock that passes both on to Dock. addresses: "unix:PATH", "tcp:HOST:PORT", or "unix:" for
    a socket in the payload's folder. secret: of the run (None: a fresh one). runs: the address at which clients on
    other nodes reach the payload (None: there are none). node: the name of this node (None: see frames.node_of).
    durable: a successor can go on when this process is killed. adopt: the folder of the one to go on from.
    """

    def __init__(
        self,
        make_dock: Callable[[Clock, Path | None], Dock],
        addresses: Sequence[str],
        *,
        secret: bytes | None = None,
        runs: str | None = None,
        node: str | None = None,
        durable: bool = False,
        adopt: Path | None = None,
    ) -> None:
        assert durable or adopt is None, "only a durable dock goes on from another one"
        self.secret = new_secret() if secret is None else check_secret(secret)
        self._make_dock = make_dock
        self._durable = DurableDock(make_dock, adopt, journalled=durable)
        folder = self._durable.dock.payload_folder()
        self._runs = None
        if runs is not None:
            assert folder is not None, "payload in memory of this process cannot be had elsewhere"
            self._runs = RunServer(folder, runs, secret=self.secret).start()
        self.place = Place.of_folder(folder, None if self._runs is None else self._runs.address, node)
        where = [f"unix:{folder}/{_SOCKET}" if address == "unix:" else address for address in addresses]
        self._service = DockService(self._durable, where, secret=self.secret, place=self.place).start()
        self.addresses = self._service.addresses

    @property
    def access(self) -> DockAccess:
        """What another process of the run needs to reach it."""
        return DockAccess(tuple(self.addresses), self.secret, self.place.node, self.place.folder)

    @property
    def seq(self) -> int:
        """The dock's seq."""
        return self._durable.dock.seq

    def close(self) -> None:
        """Stop serving, and remove the payload."""
        self._service.close()
        if self._runs is not None:
            self._runs.close()
        self._durable.close()
        self._durable.dock.close()
