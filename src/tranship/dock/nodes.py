"""The payload of a run's nodes as one process sees it: its own node's is mapped, that of others comes over a socket."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tranship.dock.block import Block
from tranship.dock.errors import StaleSlab
from tranship.dock.frames import ConnectionLost, node_of
from tranship.dock.link import DockLink, DockProxy
from tranship.dock.messages import HOME, BlockRef, NodePlace
from tranship.dock.reader import BlockReader, LocalReader, Run
from tranship.dock.remote import RemoteReader
from tranship.dock.slab import node_of_slab
from tranship.types import UserError

# How long a reader waits for a warehouse whose process has died; by then the dock has another one, or counts it lost.
_SUCCESSOR_S = 600.0


class NodesReader:
    """Reads blocks wherever they lie. link: to the dock. node: the name of this process's node (None: see node_of).

    own: the number of the node whose warehouse this process writes into. Of a node that is lost it raises StaleSlab.
    """

    def __init__(self, link: DockLink | DockProxy, secret: bytes, node: str | None) -> None:
        self._link = link
        self._secret = secret
        self._name = node
        self._places: dict[int, NodePlace] = {}
        self._readers: dict[int, BlockReader] = {}
        self.own = self._find_own()

    def open(self, ref: BlockRef) -> Block:
        """A block, read-only. StaleSlab if its slab has been recycled."""
        return self._ask(node_of_slab(ref.slab), lambda reader: reader.open(ref))

    def heads(self, refs: Sequence[BlockRef]) -> list[Block]:
        """Blocks whose values may not be here."""
        found: dict[BlockRef, Block] = {}
        for node, some in _by_node(refs, lambda ref: ref.slab).items():
            found.update(zip(some, self._heads(node, some), strict=True))
        return [found[ref] for ref in refs]

    def read(self, runs: Sequence[Run], refs: Sequence[BlockRef]) -> None:
        """Fill each run; StaleSlab if a slab was recycled before all bytes were here."""
        runs_of = _by_node(runs, lambda run: run.ref.slab)
        for node, some in _by_node(refs, lambda ref: ref.slab).items():
            self._read(node, runs_of.get(node, []), some)

    def check(self, refs: Sequence[BlockRef]) -> None:
        """StaleSlab if memory of these blocks that `open` gave holds something else by now."""
        for node, some in _by_node(refs, lambda ref: ref.slab).items():
            self._reader(node).check(some)

    def write(self, ref: BlockRef, block: memoryview) -> None:
        """Send a block to its place on the dock's node."""
        self._ask(HOME, lambda reader: reader.write(ref, block))

    @property
    def is_distant(self) -> bool:
        """Whether blocks have to be sent to the dock's node: this one has no warehouse."""
        return not isinstance(self._reader(self.own), LocalReader)

    def look_again(self) -> None:
        """Find out where things are now."""
        self.own = self._find_own()

    def close(self) -> None:
        """Forget everything; values that are still in use keep their memory."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()

    def _heads(self, node: int, refs: Sequence[BlockRef]) -> list[Block]:
        return self._ask(node, lambda reader: reader.heads(refs))

    def _read(self, node: int, runs: Sequence[Run], refs: Sequence[BlockRef]) -> None:
        self._ask(node, lambda reader: reader.read(runs, refs))

    def _find_own(self) -> int:
        self._places = {place.node: place for place in self._link.call("places")}
        return next((place.node for place in self._places.values() if self._is_here(place.name, place.folder)), HOME)

    def _is_here(self, name: str, folder: str | None) -> bool:
        return folder is not None and name == (self._name or node_of(folder))

    def _ask(self, node: int, ask: Callable[[Any], Any]) -> Any:
        """Ask the reader of a node; another time if its server has a successor. StaleSlab if the node is lost."""
        while True:
            reader = self._reader(node)
            try:
                return ask(reader)
            except ConnectionLost:
                self._readers.pop(node).close()
                self._find_again(node)

    def _reader(self, node: int) -> BlockReader:
        reader = self._readers.get(node)
        if reader is None:
            reader = self._readers[node] = self._make_reader(node)
        return reader

    def _make_reader(self, node: int) -> BlockReader:
        if node == HOME:
            home = self._link.place
            if self._is_here(home.node, home.folder):
                return LocalReader(self._link.call, home.folder)
            if home.runs is None:
                raise UserError(f"the payload of the dock is on another node ({home.node}), and not served")
            return RemoteReader(home.runs, self._secret)
        place = self._place(node)
        if self._is_here(place.name, place.folder):
            return LocalReader(self._link.call, place.folder)
        try:
            return RemoteReader(place.runs, self._secret)
        except ConnectionLost:
            self._find_again(node)
            return self._make_reader(node)

    def _place(self, node: int) -> NodePlace:
        if node not in self._places:
            self._places = {place.node: place for place in self._link.call("places")}
        if node not in self._places:
            raise StaleSlab(f"node {node} is lost, with all that was in its memory")
        return self._places[node]

    def _find_again(self, node: int) -> None:
        """The server of a node's bytes is gone: wait for its successor, or for the end of its node."""
        if node == HOME:
            # With the dock itself gone, this waits for its successor, and learns where that is.
            self._link.call("status")
            return
        place = self._place(node)
        runs = self._link.call("place_after", node, place.runs, wait_s=_SUCCESSOR_S)
        if not runs:
            self._places.pop(node)
            raise StaleSlab(f"node {place.name} is lost, with all that was in its memory")
        self._places[node] = place._replace(runs=runs)


def _by_node(items: Sequence[Any], slab_of: Callable[[Any], int]) -> dict[int, list[Any]]:
    parts: dict[int, list[Any]] = {}
    for item in items:
        parts.setdefault(node_of_slab(slab_of(item)), []).append(item)
    return parts
