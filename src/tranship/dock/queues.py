"""Policies of a take that are an order of the ready keys: as they came, the oldest tokens first, by identity."""

from __future__ import annotations

import heapq
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from sortedcontainers import SortedList

from tranship.dock.messages import Load, StageNeeds
from tranship.dock.take_policy import Facts, Key, key_of

_UNSAMPLED = sys.maxsize


class FirstCome:
    """In the order in which keys became ready; what comes back from a reader goes before all others.

    New keys are alike to may_take: the first one that it refuses ends the search.
    """

    uses_facts: ClassVar[bool] = False

    def __init__(self, needs: StageNeeds) -> None:
        self._again: OrderedDict[Key, None] = OrderedDict()
        self._new: OrderedDict[Key, None] = OrderedDict()

    def admitted(self, key: Key) -> None:
        """Nothing to do: only ready keys are queued."""

    def ready(self, key: Key, facts: Facts) -> None:
        """To the end of the queue."""
        self._new[key] = None

    def changed(self, key: Key, facts: Facts) -> None:
        """Nothing to do: facts are not looked at."""

    def pick(
        self, reader: str, limit: int, may_take: Callable[[Key], bool], load: Load | None = None
    ) -> tuple[list[Key], bool]:
        """The first ones."""
        picked: list[Key] = []
        refused = False
        for key in self._again:
            if len(picked) == limit:
                return picked, refused
            if may_take(key):
                picked.append(key)
            else:
                refused = True
        for key in self._new:
            if len(picked) == limit:
                break
            if not may_take(key):
                return picked, True
            picked.append(key)
        return picked, refused

    def lent(self, key: Key, reader: str) -> None:
        """Out of the queue."""
        if key in self._again:
            del self._again[key]
        else:
            del self._new[key]

    def back(self, key: Key, facts: Facts) -> None:
        """To the front of the queue."""
        self._again[key] = None
        self._again.move_to_end(key, last=False)

    def ended(self, key: Key) -> None:
        """Out of the queue, if it is there."""
        self._again.pop(key, None)
        self._new.pop(key, None)

    def gone(self, reader: str) -> None:
        """Nothing to do: what it had is back."""

    def better_elsewhere(self, reader: str, keys: Sequence[Key], load: Load | None = None) -> list[Key]:
        """None: whoever has a key keeps it."""
        return []

    def order(self) -> list[Key]:
        """First what came back."""
        return [*self._again, *self._new]

    def dump(self) -> Any:
        """Both parts of the queue."""
        return [list(self._again), list(self._new)]

    def load(self, plain: Any) -> None:
        """Go on from a dump."""
        self._again, self._new = (OrderedDict.fromkeys(map(key_of, keys)) for keys in plain)


class OldestFirst:
    """The lowest oldest policy version first, then in the order in which keys became ready, what came back before new.

    So that what has the least time left within the staleness bound is worked on first where a stage cannot keep up.
    Groups that are not sampled yet come last, in order of arrival. A version that changes while a key waits moves it.
    """

    uses_facts: ClassVar[bool] = True

    def __init__(self, needs: StageNeeds) -> None:
        self._order: SortedList = SortedList()  # (version, arrival, key)
        self._entries: dict[Key, tuple[int, int, Key]] = {}
        self._last = self._first = 0

    def admitted(self, key: Key) -> None:
        """Nothing to do: only ready keys are queued."""

    def ready(self, key: Key, facts: Facts) -> None:
        """Behind those of its version."""
        self._last += 1
        self._add(key, facts, self._last)

    def changed(self, key: Key, facts: Facts) -> None:
        """To its place among those of the other version."""
        rank, arrival, _ = self._entries[key]
        if rank != _rank(facts):
            self.ended(key)
            self._add(key, facts, arrival)

    def pick(
        self, reader: str, limit: int, may_take: Callable[[Key], bool], load: Load | None = None
    ) -> tuple[list[Key], bool]:
        """The first ones. New keys that are not sampled are alike: the first one that is refused ends the search."""
        picked: dict[Key, None] = {}
        refused = False
        entry = next(iter(self._order), None)
        while entry is not None and len(picked) < limit:
            rank, arrival, key = entry
            # One that was accepted may have moved behind this place since.
            if key not in picked:
                if may_take(key):
                    picked[key] = None
                else:
                    refused = True
                    if rank == _UNSAMPLED and arrival > 0:
                        break
            entry = next(self._order.irange(minimum=entry, inclusive=(False, True)), None)
        return list(picked), refused

    def lent(self, key: Key, reader: str) -> None:
        """Out of the queue."""
        self._order.remove(self._entries.pop(key))

    def back(self, key: Key, facts: Facts) -> None:
        """Before those of its version."""
        self._first -= 1
        self._add(key, facts, self._first)

    def ended(self, key: Key) -> None:
        """Out of the queue, if it is there."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._order.remove(entry)

    def gone(self, reader: str) -> None:
        """Nothing to do: what it had is back."""

    def better_elsewhere(self, reader: str, keys: Sequence[Key], load: Load | None = None) -> list[Key]:
        """None: whoever has a key keeps it."""
        return []

    def order(self) -> list[Key]:
        """By version and arrival."""
        return [key for _, _, key in self._order]

    def dump(self) -> Any:
        """The entries in order, and how far arrivals have been counted."""
        return [[list(entry) for entry in self._order], self._first, self._last]

    def load(self, plain: Any) -> None:
        """Go on from a dump."""
        entries, self._first, self._last = plain
        for rank, arrival, key in entries:
            self._entries[key_of(key)] = entry = (rank, arrival, key_of(key))
            self._order.add(entry)

    def _add(self, key: Key, facts: Facts, arrival: int) -> None:
        self._entries[key] = entry = (_rank(facts), arrival, key)
        self._order.add(entry)


class Ordered:
    """One key a take, in the order of identities: the n-th take that gives something gives the n-th key.

    What a take gives then depends on the group ids that the stage has been admitted, and those on (seed, step): never
    on which of them was ready first. A key that is not ready holds back all behind it, so this costs time where work
    takes unequally long. A key that comes back is the lowest one, and goes out next. Which of several readers gets the
    n-th key still depends on who asks first.
    """

    uses_facts: ClassVar[bool] = False

    def __init__(self, needs: StageNeeds) -> None:
        # Keys of one stage are all of one type, which can be sorted.
        self._line: list[Any] = []
        self._waiting: set[Any] = set()
        self._ready: set[Any] = set()

    def admitted(self, key: Key) -> None:
        """Into the line, at the place of its identity."""
        heapq.heappush(self._line, key)
        self._waiting.add(key)

    def ready(self, key: Key, facts: Facts) -> None:
        """It may go when it is first."""
        self._ready.add(key)

    def changed(self, key: Key, facts: Facts) -> None:
        """Nothing to do: facts are not looked at."""

    def pick(
        self, reader: str, limit: int, may_take: Callable[[Key], bool], load: Load | None = None
    ) -> tuple[list[Key], bool]:
        """The first one of the line, if it is ready."""
        while self._line and self._line[0] not in self._waiting:
            heapq.heappop(self._line)
        if not self._line or self._line[0] not in self._ready or limit < 1:
            return [], False
        first = self._line[0]
        return ([first], False) if may_take(first) else ([], True)

    def lent(self, key: Key, reader: str) -> None:
        """Out of the line."""
        self.ended(key)

    def back(self, key: Key, facts: Facts) -> None:
        """Into the line again, ready."""
        self.admitted(key)
        self._ready.add(key)

    def ended(self, key: Key) -> None:
        """Out of the line, if it is there."""
        self._waiting.discard(key)
        self._ready.discard(key)

    def gone(self, reader: str) -> None:
        """Nothing to do: what it had is back."""

    def better_elsewhere(self, reader: str, keys: Sequence[Key], load: Load | None = None) -> list[Key]:
        """None: whoever has a key keeps it."""
        return []

    def order(self) -> list[Key]:
        """By identity; those that are held back among them."""
        return sorted(self._ready)

    def dump(self) -> Any:
        """The line, and what of it is ready."""
        return [sorted(self._waiting), self.order()]  # pyrefly: ignore

    def load(self, plain: Any) -> None:
        """Go on from a dump."""
        waiting, ready = plain
        self._line = list(map(key_of, waiting))
        self._waiting, self._ready = set(self._line), set(map(key_of, ready))


def _rank(facts: Facts) -> int:
    return _UNSAMPLED if facts.oldest_version is None else facts.oldest_version
