"""A policy of a take for samplers: the longest predicted group first, to whoever can be done with it soonest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, ClassVar, NamedTuple

from tranship.dock.messages import Load, StageNeeds
from tranship.dock.take_policy import DISPATCH, Facts, Key, key_of
from tranship.dock.whole_groups import WholeGroups

_Entry = tuple[int, int, int, int, Key]  # (round, -tokens, arrival, samples, key)
_AGAIN = -1


@dataclass
class _Reader:
    """What a reader still has to do, in tokens of each key, by what it said last; its speed (None: unknown), slots."""

    speed: float | None = None
    slots: int = 1
    left: dict[Key, float] = field(default_factory=dict)

    @property
    def tokens(self) -> float:
        return sum(self.left.values())


class _Pace(NamedTuple):
    """One reader beside the others: tokens that it has left, its steps and its tokens a second."""

    left: float
    steps: float
    tokens: float

    def end(self, tokens: float, path: float) -> float:
        """When it would be done, with a group more, in seconds from now. path: tokens of one of its samples."""
        return (self.left + tokens) / self.tokens + path / self.steps


class Dispatch(WholeGroups):
    """Whole groups, the longest predicted first within each round of admissions; what comes back goes before all.

    A group goes to a reader that asks for it if

    1. no other reader would be done with it earlier, or
    2. with it, the reader has no more than its share (of all predicted tokens that are ready or left with readers, in
       proportion to the readers' speeds), and would be done with one such sample before the rest is done, or
    3. the reader has nothing, and neither has anybody else.

    If that is not so of the longest group, the longest one of its round goes out to which 2 applies. Otherwise nothing
    does, and the reader waits for the next change: somebody else, who may not have asked yet, does it sooner. So a long
    queue goes to whoever has room, a fast reader taking more of it; towards its end each reader stops at its share, the
    last groups are short ones, and a slow reader gets none that it would hold up everybody with.

    A reader's speed is slots times steps a second. Readers that never took anything count, up to `StageNeeds.readers`,
    with the mean speed; one that is gone does not. What others have left is known as of the last take that gave them
    something, less what they finished since.
    """

    name: ClassVar[str] = DISPATCH

    def __init__(self, needs: StageNeeds) -> None:
        super().__init__(needs)
        # What is kept of a key that is lent: its reader, and the tokens of one sample.
        self._readers: dict[str, _Reader] = {}

    def ready(self, key: Key, facts: Facts) -> None:
        """To its place by length, behind those of its round and length."""
        self._last += 1
        self._add((facts.round, -facts.tokens, self._last, facts.samples, key))

    def pick(
        self, reader: str, limit: int, may_take: Callable[[Key], bool], load: Load | None = None
    ) -> tuple[list[Key], bool]:
        """Groups for a reader; the first one that is refused ends the search."""
        if not self._order or limit < 1:
            return [], False
        me, others = self._paces(reader, load)
        idle = not me.left and not any(pace.left for pace in others)
        paces = [me, *others]
        rate = sum(pace.tokens for pace in paces)
        everything = self._ready_tokens + sum(pace.left for pace in paces)
        share = everything * me.tokens / rate
        rest_s = max(everything / rate, _path(self._order[0]) / max(pace.steps for pace in paces))

        def fits(entry: _Entry) -> bool:
            tokens, path = -entry[1], _path(entry)
            in_share = me.left + tokens <= share and path <= rest_s * me.steps
            return idle or in_share or all(me.end(tokens, path) <= other.end(tokens, path) for other in others)

        picked: list[Key] = []
        out: list[_Entry] = []  # They come back at the end: until `lent` they are ready.
        refused = False
        while self._order and len(picked) < limit:
            entry = self._order[0]
            if not fits(entry):
                most = min(share - me.left, rest_s * me.steps * entry[3])
                entry = next(self._order.irange(minimum=(entry[0], -most)), entry)
                if not fits(entry):
                    break
            if not may_take(entry[4]):
                refused = True
                break
            picked.append(entry[4])
            me, idle = me._replace(left=me.left - entry[1]), False
            self._order.remove(entry)
            out.append(entry)
        self._order.update(out)
        if picked:
            self._said(reader, load)
        return picked, refused

    def lent(self, key: Key, reader: str) -> None:
        """From what is ready to what the reader has left."""
        entry = self._remove(key)
        self._lent[key] = reader, _path(entry)
        self._readers.setdefault(reader, _Reader()).left[key] = float(-entry[1])

    def back(self, key: Key, facts: Facts) -> None:
        """Ready again, before all others."""
        self._give_back(key)
        self._first -= 1
        self._add((_AGAIN, -facts.tokens, self._first, facts.samples, key))

    def gone(self, reader: str) -> None:
        """One reader fewer, until another one takes something."""
        if self._readers.pop(reader, None) is not None:
            self._expected = max(1, self._expected - 1)

    def better_elsewhere(self, reader: str, keys: Sequence[Key], load: Load | None = None) -> list[Key]:
        """Keys with which readers that have nothing would be done earlier; none while something is ready for them."""
        me, others = self._paces(reader, load)
        idle = [other for other in others if not other.left]
        better: list[Key] = []
        for key in reversed(keys) if not self._order else ():
            holder, path = self._lent.get(key, ("", 0.0))
            if holder != reader or not idle:
                continue
            tokens = self._readers[reader].left[key]
            best = min(idle, key=lambda other: other.end(tokens, path))
            if best.end(tokens, path) <= me.end(0.0, path):
                better.append(key)
                idle.remove(best)
                me = me._replace(left=max(0.0, me.left - tokens))
        return better

    def order(self) -> list[Key]:
        """By round, the longest first."""
        return [entry[4] for entry in self._order]

    def dump(self) -> Any:
        """The entries in order, how far arrivals have been counted, what readers have, and how many there are."""
        each = self._readers.items()
        readers = [[name, one.speed, one.slots, self._dump_left(one)] for name, one in each]
        return [[list(entry) for entry in self._order], self._first, self._last, readers, self._expected]

    def load(self, plain: Any) -> None:
        """Go on from a dump."""
        entries, self._first, self._last, readers, self._expected = plain
        for *place, key in entries:
            self._add((*place, key_of(key)))
        for name, speed, slots, left in readers:
            self._readers[name] = _Reader(speed, slots, {key_of(key): tokens for key, tokens, _ in left})
            self._lent |= {key_of(key): (name, path) for key, _, path in left}

    def _paces(self, reader: str, load: Load | None) -> tuple[_Pace, list[_Pace]]:
        """Of a reader, and of each other one. Where a speed is not known, it is the mean of those that are."""
        one = self._readers.get(reader, _Reader())
        me = one if load is None else _Reader(load.speed, load.slots)
        others = [other for name, other in self._readers.items() if name != reader]
        known = [other.speed for other in (me, *others) if other.speed]
        mean, slots = fmean(known) if known else 1.0, fmean(other.slots for other in (me, *others))

        def pace(other: _Reader) -> _Pace:
            steps = other.speed or mean
            return _Pace(other.tokens, steps, steps * other.slots)

        absent = max(0, self._expected - len(others) - 1)
        # What it says is of both kinds of groups, and these are of one.
        left = one.tokens if load is None else min(load.tokens, one.tokens)
        return pace(me)._replace(left=left), [pace(other) for other in others] + [
            _Pace(0.0, mean, mean * slots)
        ] * absent

    def _said(self, reader: str, load: Load | None) -> None:
        """A reader has no more left than it says, spread over its keys as it was believed before."""
        me = self._readers.setdefault(reader, _Reader())
        self._expected = max(self._expected, len(self._readers))
        if load is None:
            return
        me.speed, me.slots = load.speed, load.slots
        believed = me.tokens
        if believed > load.tokens:
            me.left = {key: tokens * load.tokens / believed for key, tokens in me.left.items()}

    def _tokens(self, entry: _Entry) -> int:
        return -entry[1]

    def _with_tokens(self, entry: _Entry, tokens: int) -> _Entry:
        return entry[0], -tokens, *entry[2:]

    def _give_back(self, key: Key) -> None:
        reader, _ = self._lent.pop(key)
        del self._readers[reader].left[key]

    def _dump_left(self, reader: _Reader) -> list[list[Any]]:
        return [[key, tokens, self._lent[key][1]] for key, tokens in reader.left.items()]


def _path(entry: _Entry) -> float:
    """Tokens of one sample of a group, which are made one after the other."""
    return -entry[1] / entry[3]
