"""What became of each group: admitted = trained + dropped (by reason) + in flight, asserted at every change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

TOO_STALE = "too_stale"
LOST = "invalid:lost with its node"
_FILTERED = "filtered"
_INVALID = "invalid"


class Ledger:
    """Counts of training groups, and the outcome of each. Validation groups are counted apart.

    Outcomes other than "trained" are kept by group. The trained ones are kept as "all ended ids below a mark, and these
    above it", which stays small because groups end in about the order of their ids.
    """

    def __init__(self) -> None:
        self.admitted = 0
        self.trained = 0
        self.dropped: Counter[str] = Counter()
        self.val_admitted = 0
        self.val_ended = 0
        self._num_dropped = 0
        self._in_flight: set[int] = set()
        self._reasons: dict[int, str] = {}
        self._mark = 0
        self._above: set[int] = set()

    @property
    def in_flight(self) -> int:
        """Training groups that have been admitted and have not ended."""
        return len(self._in_flight)

    @property
    def filtered(self) -> int:
        """Groups dropped because they carry no signal."""
        return self.dropped[_FILTERED]

    @property
    def invalid(self) -> int:
        """Groups dropped because something failed ("invalid:<why>")."""
        return sum(count for reason, count in self.dropped.items() if reason.partition(":")[0] == _INVALID)

    @property
    def too_stale(self) -> int:
        """Groups dropped because they would have passed the bound on staleness."""
        return self.dropped[TOO_STALE]

    def has_ended(self, group_id: int) -> bool:
        """Whether a training group was trained on or dropped."""
        return 0 <= group_id < self._mark or group_id in self._above

    def outcome(self, group_id: int) -> str | None:
        """ "in flight", "trained", the reason of a drop, or None for a group that was never admitted."""
        if group_id in self._in_flight:
            return "in flight"
        if not self.has_ended(group_id):
            return None
        return self._reasons.get(group_id, "trained")

    def admit(self, group_id: int) -> None:
        """A training group comes in, for the only time."""
        assert group_id not in self._in_flight, f"group {group_id} is in flight already"
        assert not self.has_ended(group_id), f"group {group_id} has ended already: {self.outcome(group_id)}"
        self._in_flight.add(group_id)
        self.admitted += 1
        self.check()

    def train(self, group_id: int) -> None:
        """A group has been trained on."""
        self._end(group_id)
        self.trained += 1
        self.check()

    def drop(self, group_id: int, reason: str) -> None:
        """A group leaves for a reason."""
        self._end(group_id)
        self._reasons[group_id] = reason
        self.dropped[reason] += 1
        self._num_dropped += 1
        self.check()

    def check(self) -> None:
        """Assert that nothing is missing and nothing was counted twice."""
        ended = self.trained + self._num_dropped
        assert self.admitted == ended + self.in_flight, f"the ledger does not balance: {self}"

    def counts(self) -> dict[str, Any]:
        """All of it in numbers."""
        return {
            "admitted": self.admitted,
            "trained": self.trained,
            "dropped": dict(sorted(self.dropped.items())),
            "in_flight": self.in_flight,
            "val_admitted": self.val_admitted,
            "val_ended": self.val_ended,
        }

    def snapshot(self) -> dict[str, Any]:
        """What ended, in plain lists and numbers. Groups in flight are not in it: they are admitted again later."""
        return {
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "val_ended": self.val_ended,
            "reasons": [[group_id, reason] for group_id, reason in self._reasons.items()],
            "mark": self._mark,
            "above": sorted(self._above),
        }

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Go on from a snapshot; nothing may have been admitted yet."""
        assert self.admitted == 0, "a ledger in use cannot be restored"
        self.trained = snapshot["trained"]
        self.dropped = Counter(snapshot["dropped"])
        self.val_admitted = self.val_ended = snapshot["val_ended"]
        self._num_dropped = sum(self.dropped.values())
        self.admitted = self.trained + self._num_dropped
        self._reasons = dict(snapshot["reasons"])
        self._mark = snapshot["mark"]
        self._above = set(snapshot["above"])
        self.check()

    def dump(self) -> list[Any]:
        """Everything as plain values, for `load`: other than in a snapshot, with the groups in flight."""
        return [self.snapshot(), self.admitted, self.val_admitted, sorted(self._in_flight)]

    def load(self, plain: Sequence[Any]) -> None:
        """Go on from a dump, before anything else."""
        snapshot, admitted, val_admitted, in_flight = plain
        self.restore(snapshot)
        self.admitted, self.val_admitted, self._in_flight = admitted, val_admitted, set(in_flight)
        self.check()

    def ended_from(self, first: int) -> Iterable[int]:
        """The ids, at or above `first`, of groups that have ended."""
        return [*range(first, self._mark), *(group_id for group_id in self._above if group_id >= first)]

    def __str__(self) -> str:
        dropped = "".join(f", {count} {reason}" for reason, count in sorted(self.dropped.items()))
        return f"{self.admitted} admitted = {self.trained} trained{dropped}, {self.in_flight} in flight"

    def _end(self, group_id: int) -> None:
        assert group_id in self._in_flight, f"group {group_id} is not in flight: {self.outcome(group_id)}"
        self._in_flight.remove(group_id)
        self._above.add(group_id)
        while self._mark in self._above:
            self._above.remove(self._mark)
            self._mark += 1
