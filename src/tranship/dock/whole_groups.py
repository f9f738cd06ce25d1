"""What policies that give whole groups by their length have in common: what is ready, in order, and what is lent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from sortedcontainers import SortedList

from tranship.dock.messages import StageNeeds
from tranship.dock.take_policy import Facts, Key
from tranship.types import UserError


class WholeGroups(ABC):
    """Entries are tuples that end with their key; their order is that of the tuples. name: of the policy."""

    uses_facts: ClassVar[bool] = True
    name: ClassVar[str]

    def __init__(self, needs: StageNeeds) -> None:
        if needs.unit != "group":
            raise UserError(
                f"stage {needs.name!r} takes by {needs.unit}, and the policy {self.name} gives whole groups: "
                "use first_come"
            )
        self._expected = needs.readers
        self._order: SortedList = SortedList()
        self._entries: dict[Key, Any] = {}
        self._ready_tokens = 0
        self._first = self._last = 0
        self._lent: dict[Key, Any] = {}

    def admitted(self, key: Key) -> None:  # noqa: B027
        """Nothing to do: only ready keys are queued."""

    def changed(self, key: Key, facts: Facts) -> None:
        """To its place by another length."""
        if self._tokens(self._entries[key]) != facts.tokens:
            self._add(self._with_tokens(self._remove(key), facts.tokens))

    def ended(self, key: Key) -> None:
        """Out of the queue, or no longer with its reader."""
        if key in self._lent:
            self._give_back(key)
        elif key in self._entries:
            self._remove(key)

    @abstractmethod
    def _tokens(self, entry: Any) -> int:
        """Of all samples of an entry."""

    @abstractmethod
    def _with_tokens(self, entry: Any, tokens: int) -> Any:
        """The entry with another length."""

    @abstractmethod
    def _give_back(self, key: Key) -> None:
        """A key is no longer with its reader."""

    def _add(self, entry: Any) -> None:
        self._entries[entry[-1]] = entry
        self._order.add(entry)
        self._ready_tokens += self._tokens(entry)

    def _remove(self, key: Key) -> Any:
        entry = self._entries.pop(key)
        self._order.remove(entry)
        self._ready_tokens -= self._tokens(entry)
        return entry
