"""A policy of a take that gives readers equal numbers of tokens, in whole groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from tranship.dock.messages import Load, StageNeeds
from tranship.dock.take_policy import Facts, Key, key_of
from tranship.dock.whole_groups import WholeGroups


class Balanced(WholeGroups):
    """Whole groups, so that readers have equally many tokens: the longest first, then what fits into a fair share.

    Of n ready groups with S tokens, and O tokens that readers have and did not acknowledge, the share of each of R
    readers is F = (O + S) / R. R is `StageNeeds.readers`, or how many have something, if these are more. A take gives

    1. a reader that has nothing the longest ready group, whatever its length: it is never sent away,
    2. then groups that keep it within F, and this take within the mean length times the groups that were asked for:
       each time the longest that is no longer than what is left of both over the places that are left (n / R, or as
       many as were asked for). A reader that may take 16 of a long queue gets 16 groups of about 16 mean lengths
       together, and not the 16 longest;
    3. if not a single one fits, and no reader has fewer tokens, the shortest group; otherwise nothing, and the reader
       waits until somebody acknowledges, or more comes. Somebody else has room then.

    Why this one. Readers that ask when they are idle get the longest group each time, which is longest-first list
    scheduling (Graham 1969: with all groups there at the start, the last one ends at most 4/3 - 1/(3 R) times as late
    as in the best schedule; a fast reader gets more, since only what is not acknowledged counts as its own). Readers in
    lock step ask once (or several times) each and then wait for each other: F stays the same while they ask, since a
    token only moves from S to O, so each of them fills the same share. Giving each reader what brings a running total
    of all times nearest to the mean would do neither: a fast idle reader would be refused, and the longest groups, far
    from any mean, would be left to the end, when nothing is left that could make up for them.

    What holds for R readers that share out what is ready without acknowledging: none has more than
    max(F, longest, F + (1 - 1/R) s), where s is at most the (R + 1)-th longest group, hence at most half of the best
    schedule's largest load. So the largest load is at most 3/2 - 1/(2 R) times the best one, and the more groups there
    are for each reader, the nearer it is to the mean. Reason: in 3 the reader has at most O / R, and each reader began
    with a group that is no shorter than the one that is left.
    """

    name: ClassVar[str] = "balanced"

    def __init__(self, needs: StageNeeds) -> None:
        super().__init__(needs)
        # Entries are (tokens, arrival, key): of groups of one length the last one is the one that came first.
        self._held: dict[str, list[int]] = {}  # Reader -> groups and tokens that it has.
        self._held_tokens = 0

    def ready(self, key: Key, facts: Facts) -> None:
        """To its place by length, behind those of its length."""
        self._last -= 1
        self._add((facts.tokens, self._last, key))

    def pick(
        self, reader: str, limit: int, may_take: Callable[[Key], bool], load: Load | None = None
    ) -> tuple[list[Key], bool]:
        """Groups for a reader; the first one that is refused ends the search."""
        if not self._order or limit < 1:
            return [], False
        groups, own = self._held.get(reader, (0, 0))
        readers = max(self._expected, len(self._held.keys() | {reader}))
        share = (self._held_tokens + self._ready_tokens) // readers
        most = min(share, own + limit * self._ready_tokens // len(self._order))
        slots = min(limit, -(-len(self._order) // readers))
        picked: list[Key] = []
        # What leaves the order, so that the next search does not find it, comes back at the end.
        out: list[tuple[int, int, Key]] = []
        refused = False
        while self._order and len(picked) < limit:
            if not groups and not picked:
                entry = self._order[-1]
            elif picked:
                left = most - own
                entry = self._longest(left // max(1, slots - len(picked))) or self._longest(
                    min(left, self._order[0][0])
                )
            else:
                entry = self._longest(share - own) or self._overflow(reader, own)
            if entry is None:
                break
            if not may_take(entry[2]):
                refused = True
                break
            picked.append(entry[2])
            own += entry[0]
            if len(picked) < limit:
                self._order.remove(entry)
                out.append(entry)
        self._order.update(out)
        return picked, refused

    def lent(self, key: Key, reader: str) -> None:
        """From what is ready to what the reader has."""
        self._lend(key, reader, self._remove(key)[0])

    def _lend(self, key: Key, reader: str, tokens: int) -> None:
        self._lent[key] = (reader, tokens)
        held = self._held.setdefault(reader, [0, 0])
        held[0] += 1
        held[1] += tokens
        self._held_tokens += tokens

    def back(self, key: Key, facts: Facts) -> None:
        """Ready again, before those of its length."""
        self._give_back(key)
        self._first += 1
        self._add((facts.tokens, self._first, key))

    def gone(self, reader: str) -> None:
        """Nothing to do: what it had is back."""

    def better_elsewhere(self, reader: str, keys: Sequence[Key], load: Load | None = None) -> list[Key]:
        """None: whoever has a key keeps it."""
        return []

    def order(self) -> list[Key]:
        """The longest first."""
        return [key for _, _, key in reversed(self._order)]

    def dump(self) -> Any:
        """The entries in order, how far arrivals have been counted, and what readers have."""
        lent = [[key, reader, tokens] for key, (reader, tokens) in self._lent.items()]
        return [[list(entry) for entry in self._order], self._first, self._last, lent]

    def load(self, plain: Any) -> None:
        """Go on from a dump."""
        entries, self._first, self._last, lent = plain
        for tokens, arrival, key in entries:
            self._add((tokens, arrival, key_of(key)))
        for key, reader, tokens in lent:
            self._lend(key_of(key), reader, tokens)

    def _overflow(self, reader: str, own: int) -> tuple[int, int, Key] | None:
        """The shortest group for a reader that has something, if no other has fewer tokens."""
        others = [tokens for other, (_, tokens) in self._held.items() if other != reader]
        fewest = min(others, default=own) if len(others) + 1 >= self._expected else 0
        return self._longest(self._order[0][0]) if own <= fewest else None

    def _longest(self, most: int) -> tuple[int, int, Key] | None:
        """The longest group of at most so many tokens; of those of one length the one that came first."""
        place = self._order.bisect_left((most + 1,))
        return self._order[place - 1] if place else None

    def _tokens(self, entry: tuple[int, int, Key]) -> int:
        return entry[0]

    def _with_tokens(self, entry: tuple[int, int, Key], tokens: int) -> tuple[int, int, Key]:
        return (tokens, *entry[1:])

    def _give_back(self, key: Key) -> None:
        reader, tokens = self._lent.pop(key)
        held = self._held[reader]
        held[0] -= 1
        held[1] -= tokens
        self._held_tokens -= tokens
        if not held[0]:
            del self._held[reader]
