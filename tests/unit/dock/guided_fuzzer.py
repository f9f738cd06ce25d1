"""A small fuzzer that is guided by coverage and always there: inputs that reach new lines of the dock are kept and
changed further. The same seed does the same, whatever the machine.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import tranship.dock

_ROOM = str(Path(tranship.dock.__file__).parent)
_NUMBERS = (0, 1, 2, 3, 7, 8, 63, 64, 65, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1)


@dataclass
class Found:
    """corpus: inputs, each of which reached something new. edges: pairs of lines that followed each other."""

    corpus: list[bytes] = field(default_factory=list)
    edges: set[tuple[int, int, int]] = field(default_factory=set)


def fuzz(run: Callable[[bytes], None], seeds: Sequence[bytes], *, runs: int, seed: int = 0) -> Found:
    """Run the seeds, and `runs` inputs that are made from what has reached new edges so far. An exception of a run ends
    it; its note is the input."""
    draw = random.Random(seed)
    found = Found()
    for number in range(len(seeds) + runs):
        data = seeds[number] if number < len(seeds) else _change(found.corpus, draw)
        try:
            edges = _edges(run, data)
        except BaseException as error:
            error.add_note(f"input: {data!r}")
            raise
        if number < len(seeds) or not edges <= found.edges:
            found.corpus.append(data)
        found.edges |= edges
    return found


def _edges(run: Callable[[bytes], None], data: bytes) -> set[tuple[int, int, int]]:
    """Run with an input; (function, line, next line) in the dock's files."""
    edges: set[tuple[int, int, int]] = set()
    last: dict[int, int] = {}

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        edges.add((hash(frame.f_code), last.get(id(frame), 0), frame.f_lineno))
        last[id(frame)] = frame.f_lineno
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_ROOM):
            return None
        last[id(frame)] = 0
        return on_line

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        run(data)
    finally:
        sys.settrace(before)
    return edges


def _change(corpus: Sequence[bytes], draw: random.Random) -> bytes:
    """An input of the corpus, newer ones more often, with a few changes."""
    place = max(draw.randrange(len(corpus)), draw.randrange(len(corpus)))
    data = bytearray(corpus[place])
    for _ in range(1 << draw.randrange(4)):
        draw.choice(_CHANGES)(data, draw, corpus)
    return bytes(data)


def _flip(data: bytearray, draw: random.Random, corpus: Sequence[bytes]) -> None:
    if data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def _set_byte(data: bytearray, draw: random.Random, corpus: Sequence[bytes]) -> None:
    if data:
        data[draw.randrange(len(data))] = draw.randrange(256)


def _set_number(data: bytearray, draw: random.Random, corpus: Sequence[bytes]) -> None:
    size = draw.choice((1, 2, 4, 8))
    if len(data) >= size:
        at = draw.randrange(len(data) - size + 1)
        number = draw.choice(_NUMBERS) % (1 << 8 * size)
        data[at : at + size] = number.to_bytes(size, draw.choice(("little", "big")))


def _piece(data: Sequence[int], draw: random.Random) -> tuple[int, int]:
    start = draw.randrange(len(data) + 1)
    return start, min(len(data), start + (1 << draw.randrange(8)))


def _cut(data: bytearray, draw: random.Random, corpus: Sequence[bytes]) -> None:
    start, end = _piece(data, draw)
    del data[start:end]


def _copy(data: bytearray, draw: random.Random, corpus: Sequence[bytes]) -> None:
    """A piece of this or another input, in the place of another one, or between."""
    other = draw.choice(corpus) if draw.randrange(2) else bytes(data)
    start, end = _piece(other, draw)
    at = draw.randrange(len(data) + 1)
    data[at : at + (end - start) * draw.randrange(2)] = other[start:end]


_CHANGES = (_flip, _set_byte, _set_number, _cut, _copy, _copy)
