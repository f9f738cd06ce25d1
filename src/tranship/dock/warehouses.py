"""The books of all warehouses of a run: one for each node. A slab's number says which one it is in.

The dock keeps the books, so that rows and the memory they lie in change in one step; a warehouse's process (`keeper`)
makes and removes the files on its node, and serves them to others. It is heard of at least every `silent_s`, or its
node is taken for lost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

from tranship.dock.errors import StaleSlab
from tranship.dock.messages import HOME, BlockRef, Chore, MemoryUse, NodePlace, SlabLease
from tranship.dock.slab import first_slab, node_of_slab, slab_path
from tranship.dock.warehouse import LeaseOutcome, Slab, Warehouse


class DistantWarehouse(Warehouse):
    """The slabs of another node. What its keeper has to do is in `chores` until it is done.

    place: where they are. changes: goes up with everything that a lease of a slab changes.
    """

    def __init__(self, place: NodePlace, slab_bytes: int, capacity_bytes: int) -> None:
        super().__init__("", slab_bytes, capacity_bytes, shared=False, first=first_slab(place.node))
        self.place = place
        self.chores: OrderedDict[int, Chore] = OrderedDict()
        self.changes = 0
        self.beat = -1
        self._awaited: dict[str, int] = {}
        self._is_full = False
        self._failure = ""

    def lease_slab(self, owner: str, min_bytes: int, giving_up: int | None = None) -> SlabLease | None:
        """A slab with room, or None: there is none yet, and the keeper may be making one."""
        lease = super().lease_slab(owner, min_bytes, giving_up)
        if self.last_lease.sealed or lease is not None:
            self.changes += 1
        if lease is not None:
            self._awaited.pop(owner, None)
        return lease

    def seal(self, owner: str) -> None:
        """The owner is gone."""
        super().seal(owner)
        self._awaited.pop(owner, None)

    def reopen(self, place: NodePlace) -> None:
        """A keeper goes on for one that died."""
        self.place = place
        self.beat = -1
        self._is_full = False

    def done(self, slab: int, error: str) -> None:
        """The keeper has made or removed a slab's file, or could not make it (`error`), or could by now."""
        chore = self.chores.pop(slab, None)
        if chore is None or not chore.nbytes:
            self._is_full = self._is_full and bool(error)
            return
        entry = self._slabs[slab]
        entry.state = "free"
        # Whoever is first has it; the others ask again.
        self._awaited = {owner: other for owner, other in self._awaited.items() if other != slab}
        self._is_full = bool(error)
        self._failure = error
        if error:
            self._refusal = error
            del self._slabs[slab]
            self._held -= entry.nbytes

    def path(self, slab: int) -> str:
        """The file of a slab, on its node."""
        return str(slab_path(self.place.folder, slab))

    def dump(self) -> list[Any]:
        """Everything as plain values, for `load`."""
        own = [list(self.chores.values()), list(self._awaited.items()), self._is_full, self._failure, self._refusal]
        return [list(self.place), self.snapshot(), *own]

    @classmethod
    def load(cls, plain: Sequence[Any], slab_bytes: int, capacity_bytes: int) -> DistantWarehouse:
        """One that goes on from a dump."""
        place, slabs, chores, awaited, *said = plain
        warehouse = cls(NodePlace(*place), slab_bytes, capacity_bytes)
        warehouse.restore(slabs)
        warehouse.chores = OrderedDict((chore[0], Chore(*chore)) for chore in chores)
        warehouse._awaited = dict(awaited)
        warehouse._is_full, warehouse._failure, warehouse._refusal = said
        return warehouse

    def _create(self, owner: str, nbytes: int) -> Slab | None:
        """Have the keeper make a slab, which is found free when it is there: None for now."""
        if owner in self._awaited:
            return None
        for free in list(self._free()):
            if not self._is_full and self._held + nbytes <= self._capacity:
                break
            self._make_room(free)
            self.changes += 1
        if self._held + nbytes > self._capacity:
            self._refusal = (
                f"{self._held} of {self._capacity} bytes (dock.capacity_bytes) are in use on node {self.place.name}"
            )
            return None
        if self._is_full:
            return None
        slab = Slab(self._next, nbytes, owner, None, state="making")
        self._next += 1
        self._slabs[slab.id] = slab
        self._held += nbytes
        self._awaited[owner] = slab.id
        self.chores[slab.id] = Chore(slab.id, nbytes)
        self.changes += 1
        self._refusal = self._failure or f"the keeper of node {self.place.name} has not made it yet"
        return None

    def _write_header(self, slab: Slab) -> None:
        """Whoever leases the slab next writes it, before anything else."""

    def _remove(self, slab: Slab) -> None:
        del self._slabs[slab.id]
        self._held -= slab.nbytes
        self.chores[slab.id] = Chore(slab.id, 0)


class Warehouses:
    """The dock's own warehouse, and those of other nodes as they come and go.

    home: of the dock's node. slab_bytes, capacity_bytes: of each of the others. silent_s: after so long without a word
    from its keeper a warehouse is lost. last_lease: how the last slab of home's was found.
    """

    def __init__(self, home: Warehouse, slab_bytes: int, capacity_bytes: int, silent_s: float) -> None:
        self.home = home
        self._sizes = slab_bytes, capacity_bytes
        self._silent_s = silent_s
        self._distant: dict[int, DistantWarehouse] = {}
        self._heard: OrderedDict[int, float] = OrderedDict()
        self._next = HOME + 1

    # Nodes

    def open(self, name: str, folder: str, runs: str, now: float) -> int:
        """A keeper is there for the slabs in a folder of its node. Returns the number of the warehouse: the old one, if
        the keeper goes on for one that died."""
        for place in self.places():
            if (place.name, place.folder) == (name, folder):
                node = place.node
                self._distant[node].reopen(NodePlace(node, name, folder, runs))
                break
        else:
            node = self._next
            self._next += 1
            self._distant[node] = DistantWarehouse(NodePlace(node, name, folder, runs), *self._sizes)
        self._hear(node, now)
        return node

    def chores(self, node: int, beat: int, done: Sequence[tuple[int, str]], now: float) -> list[Chore]:
        """What a keeper has to do, once it has said what is done: (slab, error or ""). beat: one more at each message,
        so that one that is only looked at again is not taken for news of it. StaleSlab if the warehouse is lost."""
        warehouse = self._at(node)
        if beat > warehouse.beat:
            warehouse.beat = beat
            self._hear(node, now)
        for slab, error in done:
            warehouse.done(slab, error)
        return list(warehouse.chores.values())

    def places(self) -> list[NodePlace]:
        """The warehouses besides home."""
        return [warehouse.place for warehouse in self._distant.values()]

    def overdue(self, now: float) -> list[int]:
        """The nodes that have been silent for too long."""
        late = []
        for node, heard in self._heard.items():
            if heard + self._silent_s > now:
                break
            late.append(node)
        return late

    def next_deadline(self) -> float | None:
        """When the next node is lost if nobody speaks."""
        heard = next(iter(self._heard.values()), None)
        return None if heard is None else heard + self._silent_s

    def renew_all(self, now: float) -> None:
        """All nodes have their full time from now on."""
        for node in list(self._heard):
            self._hear(node, now)

    def lose_node(self, node: int) -> None:
        """A node is gone, with all that lies in it."""
        del self._distant[node], self._heard[node]

    def is_lost(self, slab: int) -> bool:
        """Whether a slab was on a node that is gone."""
        node = node_of_slab(slab)
        return node != HOME and node not in self._distant

    def _hear(self, node: int, now: float) -> None:
        self._heard[node] = now
        self._heard.move_to_end(node)

    def _at(self, node: int) -> DistantWarehouse:
        warehouse = self._distant.get(node)
        if warehouse is None:
            raise StaleSlab(f"the warehouse of node {node} is lost: it was silent for more than {self._silent_s:g} s")
        return warehouse

    # Slabs

    @property
    def changes(self) -> int:
        """Goes up with what a lease of a slab on another node changes."""
        return sum(warehouse.changes for warehouse in self._distant.values())

    @property
    def last_lease(self) -> LeaseOutcome:
        """How the last slab of home's was found."""
        return self.home.last_lease

    @property
    def folder(self) -> str | None:
        """Where home's slabs are; None if they are memory of this process."""
        return self.home.folder

    def lease_slab(self, owner: str, min_bytes: int, giving_up: int | None, node: int) -> SlabLease | None:
        """A slab of a node; see Warehouse. StaleSlab if the node is lost."""
        warehouse = self.home if node == HOME else self._at(node)
        return warehouse.lease_slab(owner, min_bytes, giving_up)

    def seal(self, owner: str) -> None:
        """The owner is gone: what it published stays, and what it still writes reaches nobody."""
        for warehouse in self._all():
            warehouse.seal(owner)

    def check_block(self, ref: BlockRef, owner: str | None = None) -> None:
        """StaleSlab unless a block lies in a slab that is being written (by `owner`, if that is given)."""
        self._of(ref.slab).check_block(ref, owner)

    def retain(self, slab: int, rows: int) -> None:
        """So many more live rows lie in a slab."""
        self._of(slab).retain(slab, rows)

    def release(self, slab: int, rows: int) -> None:
        """So many rows of a slab are dead; of one that is lost, nobody counts them."""
        if not self.is_lost(slab):
            self._of(slab).release(slab, rows)

    def memory(self, slab: int) -> memoryview:
        """The memory of a slab of this process. StaleSlab if it is gone."""
        return self._of(slab).memory(slab)

    def use(self, node: int = HOME) -> MemoryUse:
        """How full a node's memory is, and why the last slab was refused."""
        return (self.home if node == HOME else self._at(node)).use()

    def close(self) -> None:
        """Remove everything here; keepers remove what is elsewhere."""
        self.home.close()
        self._distant.clear()
        self._heard.clear()

    def _of(self, slab: int) -> Warehouse:
        node = node_of_slab(slab)
        return self.home if node == HOME else self._at(node)

    def _all(self) -> Iterable[Warehouse]:
        return [self.home, *self._distant.values()]

    # For a successor of a killed process: home's files, see Warehouse

    def snapshot(self) -> list[Any]:
        """All slabs as plain values, for `restore`."""
        return [self.home.snapshot(), self._next, [warehouse.dump() for warehouse in self._distant.values()]]

    def restore(self, snapshot: Sequence[Any]) -> None:
        """Go on from a snapshot; all nodes have been heard of last when the world began: `renew_all` follows."""
        home, self._next, distant = snapshot
        self.home.restore(home)
        for plain in distant:
            warehouse = DistantWarehouse.load(plain, *self._sizes)
            self._distant[warehouse.place.node] = warehouse
            self._heard[warehouse.place.node] = 0.0

    def give_back(self, slabs: Sequence[int]) -> None:
        """The memory of these free slabs of home's goes back to the system."""
        self.home.give_back(slabs)

    def free_slabs(self) -> list[int]:
        """Home's slabs that hold nothing and that nobody writes into."""
        return self.home.free_slabs()

    def repeat_lease(self, owner: str, giving_up: int | None, outcome: LeaseOutcome) -> None:
        """Do again what a lease of home's did."""
        self.home.repeat_lease(owner, giving_up, outcome)

    def settle(self) -> list[int]:
        """All has been repeated."""
        return self.home.settle()

    def lose(self, slabs: Sequence[int]) -> None:
        """Forget free slabs of home's whose files are gone."""
        self.home.lose(slabs)
