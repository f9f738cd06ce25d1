"""The groups that are in the dock, the controllers that they pass, and the payload that they keep alive."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from tranship.dock.controller import Controller, Key
from tranship.dock.group import OWN, Group
from tranship.dock.messages import BlockRef, StageNeeds
from tranship.dock.take_policy import Facts
from tranship.dock.warehouses import Warehouses
from tranship.types import SampleId

_SETS_KEPT = 1024


class Ready(NamedTuple):
    """Rows of a group became ready at a stage."""

    stage: str
    group: Group


class GroupTable:
    """Groups by id. A published column goes to the controllers whose stage reads it, and to no other."""

    def __init__(self, stages: Sequence[StageNeeds], warehouse: Warehouses) -> None:
        self.controllers = {needs.name: Controller(needs) for needs in stages}
        if len(self.controllers) != len(stages):
            raise ValueError(f"a stage stands twice: {[needs.name for needs in stages]}")
        self._readers: defaultdict[str, list[Controller]] = defaultdict(list)
        for controller in self.controllers.values():
            for column in dict.fromkeys(controller.needs.reads):
                self._readers[column].append(controller)
        self._readers_of_sets: dict[tuple[str, ...], list[tuple[Controller, int]]] = {}
        self._informed = [controller for controller in self.controllers.values() if controller.uses_facts]
        self._warehouse = warehouse
        self._groups: dict[int, Group] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._groups

    def groups(self) -> Iterable[Group]:
        """All groups that are here."""
        return self._groups.values()

    def get(self, group_id: int) -> Group | None:
        """A group, if it is here."""
        return self._groups.get(group_id)

    def admit(self, group: Group) -> list[Ready]:
        """A new group, without columns."""
        assert group.group_id not in self._groups, group.group_id
        self._groups[group.group_id] = group
        return [
            Ready(name, group)
            for name, controller in self.controllers.items()
            if controller.admit(group.group_id, group.size, group.kind)
        ]

    def tell(self, group: Group) -> None:
        """The facts of a group have changed: those controllers learn it whose policy looks at them."""
        if group.here and self._informed:
            facts = Facts(group.oldest_version, group.num_tokens, group.round, group.size)
            for controller in self._informed:
                controller.tell(group.group_id, facts)

    def gone(self, reader: str) -> None:
        """A reader is no longer there; its leases have ended."""
        for controller in self.controllers.values():
            controller.gone(reader)

    def store(self, group: Group, row: SampleId, columns: Iterable[str], ref: BlockRef) -> list[Ready]:
        """Columns of a row that it did not have before. Returns where something became ready."""
        ready: list[Ready] = []
        for column in columns:
            new = group.store(column, row.sample_index, ref)
            complete = bool(new) and group.is_complete(column)
            for controller in self._readers.get(column, ()):
                keys: list[Key] = []
                if not controller.takes_groups:
                    keys = [(group.group_id, index) for index in new]
                elif complete:
                    keys = [group.group_id]
                if sum(controller.arrived(key) for key in keys):
                    ready.append(Ready(controller.needs.name, group))
        group.slabs[ref.slab] += 1
        self._warehouse.retain(ref.slab, 1)
        return ready

    def _readers_of(self, columns: Sequence[str]) -> list[tuple[Controller, int]]:
        """The controllers whose stage reads any of the columns, and how many of them."""
        key = tuple(columns)
        found = self._readers_of_sets.get(key)
        if found is None:
            names = [controller.needs.name for column in key for controller in self._readers.get(column, ())]
            found = [(self.controllers[name], count) for name, count in Counter(names).items()]
            if len(self._readers_of_sets) < _SETS_KEPT:
                self._readers_of_sets[key] = found
        return found

    def store_whole(self, groups: Sequence[Group], columns: Sequence[str], ref: BlockRef) -> list[Ready]:
        """Columns of all samples of groups, none of which had any of them. Returns where something became ready."""
        readers = self._readers_of(columns)
        refs = dict.fromkeys(columns, ref)
        ready: list[Ready] = []
        num_rows = 0
        # From what groups had to what they have now: as long as they get the same, they share it.
        wholes: dict[int, tuple[Mapping[str, BlockRef], Mapping[str, BlockRef]]] = {}
        for group in groups:
            old = group.whole
            if id(old) not in wholes:
                wholes[id(old)] = (old, {**old, **refs})
            group.whole = wholes[id(old)][1]
            for controller, count in readers:
                if controller.takes_groups:
                    became_ready = controller.arrived(group.group_id, count)
                else:
                    keys = [(group.group_id, index) for index in range(group.size)]
                    became_ready = sum(controller.arrived(key, count) for key in keys)
                if became_ready:
                    ready.append(Ready(controller.needs.name, group))
            group.slabs[ref.slab] = group.slabs.get(ref.slab, 0) + group.size
            num_rows += group.size
        self._warehouse.retain(ref.slab, num_rows)
        return ready

    def missing(self, row: SampleId, group: Group, columns: Sequence[str]) -> list[str]:
        """Those of the columns that a row does not have yet."""
        if row.sample_index == OWN:
            own = (column for column in columns if OWN not in group.columns.get(column, {}))
            return [column for column in own if column not in group.whole]
        return [column for column in columns if not group.has(column, row.sample_index)]

    def load(self, groups: Iterable[Group], controllers: Mapping[str, Sequence[Any]]) -> None:
        """Go on with groups, and with what their stages' controllers were when they were dumped, before anything else.

        The warehouse knows already which of its slabs they keep alive.
        """
        assert not self._groups, "a table in use cannot go on from a dump"
        self._groups = {group.group_id: group for group in groups}
        kinds = {group.group_id: group.kind for group in self._groups.values()}
        for name, plain in controllers.items():
            self.controllers[name].load(plain, kinds)

    def leave(self, group: Group) -> dict[int, list[Key]]:
        """A group leaves the dock; returns which keys were with readers, by lease. Its payload stays until `free`."""
        group.here = False
        del self._groups[group.group_id]
        lost: defaultdict[int, list[Key]] = defaultdict(list)
        for controller in self.controllers.values():
            for key, lease in controller.forget(group.group_id).items():
                lost[lease].append(key)
        return lost

    def is_lost(self, group: Group) -> bool:
        """Whether any of a group's rows was on a node that is gone."""
        return any(self._warehouse.is_lost(slab) for slab in group.slabs)

    def is_lost_block(self, ref: BlockRef) -> bool:
        """Whether a block was on a node that is gone."""
        return self._warehouse.is_lost(ref.slab)

    @staticmethod
    def own_columns(group: Group) -> dict[BlockRef, list[str]]:
        """A group's own columns, by the block they lie in."""
        own: defaultdict[BlockRef, list[str]] = defaultdict(list)
        for column, refs in group.columns.items():
            if OWN in refs:
                own[refs[OWN]].append(column)
        return own

    @contextmanager
    def held(self, blocks: Iterable[BlockRef]) -> Iterator[None]:
        """While it lasts, these blocks stay where they are."""
        for ref in blocks:
            self._warehouse.retain(ref.slab, 1)
        yield
        for ref in blocks:
            self._warehouse.release(ref.slab, 1)

    def free(self, group: Group) -> None:
        """Nobody looks at a group that has left: its rows are dead."""
        for slab, rows in group.slabs.items():
            self._warehouse.release(slab, rows)
        group.slabs.clear()
