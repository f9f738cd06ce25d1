"""The dock's messages as bytes: msgpack of plain values, field by field, by one table of methods. Nothing is pickled.

What comes in is believed only after it has been looked at: a message of another shape, of an unknown method, or with a
value of another type or out of range is a ValueError ("malformed message: ..."), and nothing has happened then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgpack
import numpy as np

from tranship.dock.errors import DockFull, StaleLease, StaleSlab
from tranship.dock.group import all_samples
from tranship.dock.messages import (
    Admission,
    Answer,
    BlockRef,
    Chore,
    ExpiredLease,
    GroupEntry,
    Load,
    MemoryUse,
    NodePlace,
    Publish,
    SlabLease,
    Status,
    Take,
    Where,
)
from tranship.dock.place import Place
from tranship.dock.rows import Rows
from tranship.types import RunError, SampleId, UserError

MAX_TEXT = 1 << 12
MAX_ITEMS = 1 << 20
MAX_WAIT_S = 10**6
_BY_NAME = {error.__name__: error for error in (StaleLease, StaleSlab, DockFull, UserError, RunError, ValueError)}


class Request(NamedTuple):
    """A call of a method by name. wait_s: how long it may wait for an answer that is not None. ticket: a number that
    the client uses for no other message, so that one that it has to repeat is known; 0: it is never repeated."""

    method: str
    arguments: dict[str, Any]
    wait_s: float
    ticket: int = 0


@dataclass(frozen=True)
class Codec:
    """One type: plain values from it, and it from plain values (ValueError if they are not of it)."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


def encode_request(method: str, arguments: Mapping[str, Any], wait_s: float = 0.0, ticket: int = 0) -> bytes:
    """The bytes of a call. ValueError for a method or an argument that the table does not have."""
    codecs = _of(METHODS, method)[0]
    plain = {name: _of(codecs, name).encode(value) for name, value in arguments.items()}
    return _packed([method, plain, float(wait_s), ticket])


def decode_request(data: bytes) -> Request:
    """The call that some bytes are. ValueError if they are none."""
    method, plain, wait_s, ticket = _fields(_plain(data), 4)
    codecs = _of(METHODS, _text(method))[0]
    if type(plain) is not dict:
        raise _malformed("arguments", plain)
    arguments = {name: _of(codecs, name).decode(value) for name, value in plain.items()}
    if not 0 <= _number(wait_s) <= MAX_WAIT_S:
        raise _malformed(f"a wait of at most {MAX_WAIT_S} s", wait_s)
    return Request(method, arguments, float(wait_s), _int(ticket))


def encode_reply(method: str, result: Any) -> bytes:
    """The bytes of what a method returned."""
    return _packed([True, _of(METHODS, method)[1].encode(result)])


def encode_failure(error: BaseException) -> bytes:
    """The bytes of what a method raised: its type, if the table has it, and its words."""
    name = next((name for name, kind in _BY_NAME.items() if type(error) is kind), None)
    words = str(error) if name else f"{type(error).__name__} in the dock: {error}"
    return _packed([False, name or "RunError", words[:MAX_TEXT]])


def decode_reply(method: str, data: bytes) -> Any:
    """What a method returned; raises what it raised."""
    plain = _plain(data)
    if type(plain) is list and len(plain) == 2 and plain[0] is True:
        return _of(METHODS, method)[1].decode(plain[1])
    _, name, words = _fields(plain, 3)
    raise _BY_NAME.get(_text(name), RunError)(_text(words))


def encode_place(place: Place) -> bytes:
    """The bytes of a place: what a service says of its payload when a client has said its name."""
    return _packed([place.node, place.folder, place.runs])


def decode_place(data: bytes) -> Place:
    """The place that some bytes are. ValueError if they are none."""
    node, folder, runs = _fields(_plain(data), 3)
    text = _optional(TEXT)
    return Place(_text(node), text.decode(folder), text.decode(runs))


def _packed(plain: Any) -> bytes:
    data = msgpack.packb(plain)
    assert data is not None
    return data


def _plain(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, raw=False, strict_map_key=False, use_list=True)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ValueError(f"malformed message: {error}") from error


def _malformed(what: str, value: Any) -> ValueError:
    return ValueError(f"malformed message: {what} cannot be {type(value).__name__} {repr(value)[:60]}")


def _of(table: Mapping[str, Any], name: Any) -> Any:
    if type(name) is not str or name not in table:
        raise ValueError(f"malformed message: {repr(name)[:60]} is none of {sorted(table)}")
    return table[name]


# Plain types


def _fields(value: Any, count: int) -> list[Any]:
    if type(value) is not list or len(value) != count:
        raise _malformed(f"{count} fields", value)
    return value


def _int(value: Any) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise _malformed("a whole number", value)
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or value != value:
        raise _malformed("a number", value)
    return float(value)


def _bool(value: Any) -> bool:
    if type(value) is not bool:
        raise _malformed("a yes or no", value)
    return value


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > MAX_TEXT:
        raise _malformed("a text", value)
    return value


def _items(value: Any) -> list[Any]:
    if type(value) is not list or len(value) > MAX_ITEMS:
        raise _malformed("a list", value)
    return value


def _same(value: Any) -> Any:
    return value


def _optional(codec: Codec) -> Codec:
    return Codec(
        lambda value: None if value is None else codec.encode(value),
        lambda plain: None if plain is None else codec.decode(plain),
    )


def _list_of(codec: Codec, kind: type = list) -> Codec:
    return Codec(
        lambda values: [codec.encode(value) for value in values],
        lambda plain: kind([codec.decode(value) for value in _items(plain)]),
    )


def _record(kind: type, *codecs: Codec) -> Codec:
    """A type that is its fields, in order."""
    names = list(kind.__annotations__)
    assert len(names) == len(codecs), kind
    encoders = [(name, codec.encode) for name, codec in zip(names, codecs, strict=True)]
    decoders = [codec.decode for codec in codecs]

    def encode(value: Any) -> list[Any]:
        return [encode_field(getattr(value, name)) for name, encode_field in encoders]

    def decode(plain: Any) -> Any:
        fields = _fields(plain, len(decoders))
        return kind(*[decode_field(field) for decode_field, field in zip(decoders, fields, strict=True)])

    return Codec(encode, decode)


def _counts(plain: Any) -> dict[str, int]:
    if type(plain) is not dict:
        raise _malformed("counts by name", plain)
    return {_text(name): _int(count) for name, count in plain.items()}


INT, NUMBER, BOOL, TEXT = Codec(_same, _int), Codec(float, _number), Codec(_same, _bool), Codec(_same, _text)
INTS, INT_TUPLE, TEXTS = _list_of(INT), _list_of(INT, tuple), _list_of(TEXT, tuple)
COUNTS = Codec(dict, _counts)


def _one_of(*names: str) -> Codec:
    def decode(plain: Any) -> str:
        if plain not in names:
            raise _malformed(f"one of {names}", plain)
        return plain

    return Codec(_same, decode)


KIND = _one_of("train", "val")


# Rows and blocks


def _encode_rows(rows: Sequence[SampleId]) -> bytes:
    return Rows.of(rows).array.tobytes()


def _decode_rows(data: Any) -> Rows:
    if type(data) is not bytes or len(data) % 24 or len(data) > 24 * MAX_ITEMS:
        raise _malformed("identities of rows", data)
    rows = Rows(np.frombuffer(data, "<i8").reshape(-1, 3))
    if rows.has_repeats:
        raise ValueError("malformed message: a row stands in it twice")
    return rows


def _decode_ref(plain: Any) -> BlockRef:
    ref = BlockRef(*map(_int, _fields(plain, 4)))
    if min(ref) < 0:
        raise _malformed("a block", plain)
    return ref


ROWS = Codec(_encode_rows, _decode_rows)
REF = Codec(list, _decode_ref)


# A take: groups share few distinct blocks and sets of columns, so each is sent once and then referred to by its place


def _encode_take(take: Take) -> list[Any]:
    refs: dict[BlockRef, int] = {}
    patterns: dict[Any, int] = {}
    known: dict[tuple[int, int], int] = {}
    groups = []
    for group_id, size, kind, attempt, shared, samples, own, oldest, expected in take.groups:
        pattern = known.get((id(shared), id(own)))
        if pattern is None:
            key = (tuple(shared.items()), tuple(own.items()))
            pattern = known[id(shared), id(own)] = patterns.setdefault(key, len(patterns))
        taken = None if samples == all_samples(size) else samples
        groups.append((group_id, size, kind, attempt, pattern, taken, oldest, expected))

    def place(ref: BlockRef) -> int:
        return refs.setdefault(ref, len(refs))

    def where(found: Where) -> int | list[int]:
        return place(found) if isinstance(found, BlockRef) else [place(ref) for ref in found]

    sent = [[{c: place(r) for c, r in shared}, {c: where(r) for c, r in own}] for shared, own in patterns]
    head = [take.lease, take.stage, take.deadline, take.version, list(take.window), take.num_dropped]
    return [*head, [list(ref) for ref in refs], sent, groups]


def _decode_take(plain: Any) -> Take:
    lease, stage, deadline, version, window, num_dropped, sent_refs, sent, groups = _fields(plain, 9)
    refs = [_decode_ref(ref) for ref in _items(sent_refs)]

    def at(place: Any) -> BlockRef:
        if not 0 <= _int(place) < len(refs):
            raise _malformed("a block's place", place)
        return refs[place]

    def where(found: Any) -> Where:
        return tuple(at(place) for place in _items(found)) if type(found) is list else at(found)

    patterns = []
    for pattern in _items(sent):
        shared, own = _fields(pattern, 2)
        if type(shared) is not dict or type(own) is not dict:
            raise _malformed("columns", pattern)
        refs_of = {_text(c): where(r) for c, r in own.items()}
        lengths = {len(found) for found in refs_of.values() if not isinstance(found, BlockRef)}
        patterns.append(({_text(c): at(r) for c, r in shared.items()}, refs_of, lengths))
    entries = []
    for group in _items(groups):
        group_id, size, kind, attempt, pattern, samples, oldest, expected = _fields(group, 8)
        if not 0 <= _int(pattern) < len(patterns):
            raise _malformed("a pattern's place", pattern)
        if not 1 <= _int(size) <= MAX_ITEMS:
            raise _malformed("a group's size", size)
        taken = all_samples(size) if samples is None else INT_TUPLE.decode(samples)
        shared, own, lengths = patterns[pattern]
        if lengths and lengths != {len(taken)}:
            raise _malformed("one block for each sample", group)
        head = _int(group_id), size, KIND.decode(kind), _int(attempt)
        oldest = None if oldest is None else _int(oldest)
        entries.append(GroupEntry(*head, shared, taken, own, oldest, _int(expected)))
    told = (_int(lease), _text(stage), _number(deadline), _int(version))
    return Take(*told, tuple(entries), INT_TUPLE.decode(window), _int(num_dropped))


TAKE = Codec(_encode_take, _decode_take)
ANSWER = _record(Answer, _optional(TAKE), INT, BOOL)
ADMISSION = _record(Admission, INT, INT, KIND, REF, TEXTS, _optional(INT), INT)
LOAD = _record(Load, NUMBER, INT, _optional(NUMBER))
PUBLISH = _record(Publish, TEXT, REF, ROWS, TEXTS, _optional(INT), _optional(INT), _optional(INT_TUPLE))
STATUS = _record(Status, INT, INT, INT, INT, INT)
SLAB_LEASE = _record(SlabLease, INT, INT, _optional(TEXT), INT)
MEMORY_USE = _record(MemoryUse, INT, INT, INT, TEXT)
CHORE = _record(Chore, INT, INT)
NODE_PLACE = _record(NodePlace, INT, TEXT, TEXT, TEXT)
EXPIRED = _list_of(_record(ExpiredLease, INT, TEXT, TEXT, INT_TUPLE))


# Nested plain values whose shape is known: dictionaries with fixed keys


def _dict_of(**codecs: Codec) -> Codec:
    def decode(plain: Any) -> dict[str, Any]:
        if type(plain) is not dict or plain.keys() != codecs.keys():
            raise _malformed(f"the fields {sorted(codecs)}", plain)
        return {name: codec.decode(plain[name]) for name, codec in codecs.items()}

    return Codec(lambda value: {name: codec.encode(value[name]) for name, codec in codecs.items()}, decode)


def _pair(first: Codec, second: Codec) -> Codec:
    def decode(plain: Any) -> list[Any]:
        one, two = _fields(plain, 2)
        return [first.decode(one), second.decode(two)]

    return Codec(lambda value: [first.encode(value[0]), second.encode(value[1])], decode)


_INT_PAIRS = _list_of(_pair(INT, INT))
LEDGER = _dict_of(trained=INT, dropped=COUNTS, val_ended=INT, reasons=_list_of(_pair(INT, TEXT)), mark=INT, above=INTS)
SNAPSHOT = _dict_of(version=INT, ledger=LEDGER, in_flight=_INT_PAIRS, tombstones=_INT_PAIRS)
LEDGER_COUNTS = _dict_of(admitted=INT, trained=INT, dropped=COUNTS, in_flight=INT, val_admitted=INT, val_ended=INT)

NOTHING = Codec(lambda value: None, lambda plain: None)
_LEASE = {"lease": INT}
_ASK = {
    "method": _one_of("take", "take_rows", "take_batch"),
    "stage": TEXT,
    "reader": TEXT,
    "max_groups": INT,
    "max_rows": INT,
    "groups": INT,
    "version": _optional(INT),
    "kinds": _list_of(KIND, tuple),
    "load": _optional(LOAD),
    "done": INTS,
}

# Method of a Dock -> its arguments, what it returns. The order of the arguments is that of the method.
METHODS: Mapping[str, tuple[Mapping[str, Codec], Codec]] = {
    "admit": ({"groups": _list_of(ADMISSION)}, NOTHING),
    "publish": ({"publish": PUBLISH}, NOTHING),
    "ask": (_ASK, ANSWER),
    "ack": (_LEASE | {"group_ids": _optional(INTS)}, NOTHING),
    "release": (_LEASE, NOTHING),
    "renew": (_LEASE, INT_TUPLE),
    "better_elsewhere": ({"stage": TEXT, "reader": TEXT, "group_ids": INTS, "load": _optional(LOAD)}, INTS),
    "check": ({"leases": INTS}, NOTHING),
    "started": (_LEASE | {"group_id": INT, "version": INT}, NOTHING),
    "drop": ({"group_ids": INTS, "reason": TEXT, "lease": _optional(INT)}, NOTHING),
    "trained": (_LEASE, INTS),
    "finish_val": ({"group_ids": INTS}, NOTHING),
    "status": ({}, STATUS),
    "num_admissible": ({}, INT),
    "changed": ({"since": INT}, _optional(INT)),
    "advance": ({"version": INT}, NOTHING),
    "expire": ({}, EXPIRED),
    "retire": ({"reader": TEXT}, NOTHING),
    "ledger_counts": ({}, LEDGER_COUNTS),
    "snapshot": ({}, SNAPSHOT),
    "restore": ({"snapshot": SNAPSHOT}, INTS),
    "lease_slab": ({"owner": TEXT, "min_bytes": INT, "giving_up": _optional(INT), "node": INT}, _optional(SLAB_LEASE)),
    "open_warehouse": ({"name": TEXT, "folder": TEXT, "runs": TEXT}, INT),
    "chores": ({"node": INT, "beat": INT, "done": _list_of(_pair(INT, TEXT))}, _optional(_list_of(CHORE))),
    "places": ({}, _list_of(NODE_PLACE)),
    "place_after": ({"node": INT, "runs": TEXT}, _optional(TEXT)),
    "payload_folder": ({}, _optional(TEXT)),
    "memory_use": ({"node": INT}, MEMORY_USE),
}


def bind(method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    names = list(_of(METHODS, method)[0])
    assert len(args) <= len(names), (method, args)
    return dict(zip(names, args, strict=False)) | dict(kwargs)
