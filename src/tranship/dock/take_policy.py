"""Which of the ready rows a take gives: a table of policies, one per stage, and what a policy is.

The bound on staleness is none of them: it holds at admission and at each take, whatever the policy (`policy`, `bound`).
A policy decides from messages alone, never from a clock or from asks that gave nothing: a dock that does its journal
again has to come to the same leases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from tranship.dock.messages import Load, StageNeeds
from tranship.lookup import resolve
from tranship.types import UserError

Key = int | tuple[int, int]

FIRST_COME, DISPATCH = "first_come", "dispatch"
POLICIES: Mapping[str, str] = {
    "first_come": "tranship.dock.queues:FirstCome",
    "oldest_first": "tranship.dock.queues:OldestFirst",
    "balanced": "tranship.dock.balanced:Balanced",
    "ordered": "tranship.dock.queues:Ordered",
    "dispatch": "tranship.dock.dispatch:Dispatch",
}


class Facts(NamedTuple):
    """What is known of a group: the oldest policy version of its tokens (None: it is not sampled), how many tokens its
    samples have, as far as publishers said so (before that: as was predicted), the dock's version when it came, and its
    number of samples."""

    oldest_version: int | None = None
    tokens: int = 0
    round: int = 0
    samples: int = 1


class TakePolicy(Protocol):
    """The keys of one kind (train or val) at one stage. An entry of the table is called with the StageNeeds, and gives
    one. Each method costs O(log n) for n ready keys, and `pick` that for each key that it gives; none may look at all.

    uses_facts: whether `changed` is to be called.
    """

    uses_facts: ClassVar[bool]

    def admitted(self, key: Key) -> None:
        """A key is at this stage; it is not ready."""

    def ready(self, key: Key, facts: Facts) -> None:
        """All columns of a key are there."""

    def changed(self, key: Key, facts: Facts) -> None:
        """Other facts hold for a ready key. `may_take` in `pick` may lead to this for the key that it was asked of."""

    def pick(
        self, reader: str, limit: int, may_take: Callable[[Key], bool], load: Load | None = None
    ) -> tuple[list[Key], bool]:
        """Up to `limit` ready keys for a reader, each of them accepted by may_take, and whether that refused one.

        They stay ready until `lent`. may_take is asked once for each key, and what it accepts is given out. load: what
        the reader said of itself, if it did; it may be remembered only if something is given.
        """
        ...

    def lent(self, key: Key, reader: str) -> None:
        """A ready key is with a reader."""

    def back(self, key: Key, facts: Facts) -> None:
        """A reader did not finish a key: it is ready again. Of several, the last one in order is said first."""

    def ended(self, key: Key) -> None:
        """A key is done at this stage, or its group has left, in whatever state it was."""

    def gone(self, reader: str) -> None:
        """A reader is no longer there; what it had is back."""

    def better_elsewhere(self, reader: str, keys: Sequence[Key], load: Load | None = None) -> list[Key]:
        """Of keys that a reader has and did not begin, those that it should give back for others. Changes nothing."""
        ...

    def order(self) -> list[Key]:
        """The ready keys, in the order in which they would be given one at a time."""
        ...

    def dump(self) -> Any:
        """All that it knows as plain values (a key as an int or a list), for `load`; equal for equal states."""
        ...

    def load(self, plain: Any) -> None:
        """Go on from a dump, before anything else."""


def key_of(plain: Any) -> Key:
    """The key that a dump holds."""
    return plain if type(plain) is int else (plain[0], plain[1])


def policy_of(needs: StageNeeds, what: str = "") -> Callable[[], TakePolicy]:
    """What makes the policy of a stage. UserError for a name that is not known, or a stage that it does not fit.

    what: the setting that named it, for the error.
    """
    make = resolve(needs.policy, POLICIES, what or f"the policy of stage {needs.name!r}")
    try:
        made = make(needs)
    except TypeError as error:
        raise UserError(f"{what or needs.name}: {needs.policy!r} is no policy of takes: {error}") from error
    if not hasattr(made, "pick") or not hasattr(made, "dump"):
        raise UserError(f"{what or needs.name}: {needs.policy!r} is no policy of takes: it makes {type(made).__name__}")
    return lambda: make(needs)
