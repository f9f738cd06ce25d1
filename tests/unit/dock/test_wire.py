"""Messages come back equal, and what is no message is a ValueError and nothing else."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tranship.dock import wire
from tranship.dock.errors import DockFull, StaleLease, StaleSlab
from tranship.dock.messages import (
    Admission,
    Answer,
    BlockRef,
    ExpiredLease,
    GroupEntry,
    MemoryUse,
    Publish,
    SlabLease,
    Status,
    Take,
)
from tranship.dock.place import Place
from tranship.types import RunError, SampleId, UserError

ints = st.integers(-(2**63), 2**63 - 1)
counts = st.integers(0, 2**62)
texts = st.text(max_size=12)
kinds = st.sampled_from(["train", "val"])
refs = st.builds(BlockRef, counts, counts, counts, counts)
rows = st.lists(st.builds(SampleId, ints, ints, ints), max_size=6, unique_by=lambda row: row[:2])
columns = st.lists(texts, max_size=4, unique=True).map(tuple)


@st.composite
def entries(draw):
    size = draw(st.integers(1, 5))
    samples = tuple(draw(st.permutations(range(size)))[: draw(st.integers(1, size))])
    each = st.lists(refs, min_size=len(samples), max_size=len(samples)).map(tuple)
    own = draw(st.dictionaries(texts, refs | each, max_size=3))
    shared = draw(st.dictionaries(texts, refs, max_size=2))
    head = (draw(ints), size, draw(kinds), draw(ints))
    return GroupEntry(*head, shared, samples, own, draw(st.none() | ints), draw(ints))


takes = st.builds(
    Take,
    lease=ints,
    stage=texts,
    deadline=st.floats(allow_nan=False, allow_infinity=False),
    version=ints,
    groups=st.lists(entries(), max_size=4).map(tuple),
    window=st.lists(ints, max_size=4).map(tuple),
    num_dropped=counts,
)
token_counts = st.none() | st.lists(ints, max_size=4).map(tuple)
publishes = st.builds(Publish, texts, refs, rows, columns, st.none() | ints, st.none() | ints, token_counts)
admissions = st.builds(Admission, ints, counts, kinds, refs, columns, st.none() | ints, ints)


@settings(max_examples=60, deadline=None)
@given(publishes)
def test_a_publish_comes_back(publish):
    request = wire.decode_request(wire.encode_request("publish", {"publish": publish}, 0.0))
    assert request == wire.Request("publish", {"publish": publish}, 0.0)
    assert all(type(row) is SampleId for row in request.arguments["publish"].rows)


@settings(max_examples=60, deadline=None)
@given(st.lists(admissions, max_size=4), st.floats(0, 1e6))
def test_admissions_come_back(groups, wait_s):
    assert wire.decode_request(wire.encode_request("admit", {"groups": groups}, wait_s)).arguments == {"groups": groups}


@settings(max_examples=60, deadline=None)
@given(st.none() | takes, counts, st.booleans())
def test_a_take_comes_back(take, seq, refused):
    answer = wire.decode_reply("ask", wire.encode_reply("ask", Answer(take, seq, refused)))
    assert answer == Answer(take, seq, refused)
    if take is not None:
        assert [type(group) for group in answer.take.groups] == [GroupEntry] * len(take.groups)


SNAPSHOT = {
    "version": 3,
    "ledger": {
        "trained": 1,
        "dropped": {"filtered": 2},
        "val_ended": 0,
        "reasons": [[4, "filtered"]],
        "mark": 1,
        "above": [4],
    },
    "in_flight": [[5, 0]],
    "tombstones": [[4, 2]],
}


@pytest.mark.parametrize(
    ("method", "result"),
    [
        ("status", Status(1, 2, 3, 4, 5)),
        ("lease_slab", None),
        ("lease_slab", SlabLease(1, 2, "/dev/shm/x", 4096)),
        ("lease_slab", SlabLease(1, 2, None, 4096)),
        ("memory_use", MemoryUse(1, 2, 3, "full")),
        ("expire", [ExpiredLease(1, "train", "me", (1, 2))]),
        ("renew", (1, 2)),
        ("snapshot", SNAPSHOT),
        ("payload_folder", None),
        ("ack", None),
    ],
)
def test_results_come_back(method, result):
    back = wire.decode_reply(method, wire.encode_reply(method, result))
    assert back == result
    assert type(back) is type(result)


@pytest.mark.parametrize("kind", [StaleLease, StaleSlab, DockFull, UserError, RunError, ValueError])
def test_errors_keep_their_type_and_words(kind):
    with pytest.raises(kind, match="so it is") as caught:
        wire.decode_reply("ack", wire.encode_failure(kind("so it is")))
    assert type(caught.value) is kind


def test_a_bug_in_the_dock_arrives_as_a_run_error():
    with pytest.raises(RunError, match="AssertionError in the dock: 3 of 4"):
        wire.decode_reply("ack", wire.encode_failure(AssertionError("3 of 4")))


def test_a_place_comes_back():
    for place in (Place("node", "/dev/shm/x", "tcp:a:1"), Place("node", None)):
        assert wire.decode_place(wire.encode_place(place)) == place


def plain_request(method, arguments, wait_s=0.0):
    return msgpack.packb([method, arguments, wait_s, 0])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb(None),
        msgpack.packb([]),
        msgpack.packb(["ack", {"lease": 1}]),
        plain_request("close", {}),
        plain_request("__class__", {}),
        plain_request("ack", {"lease": 1, "more": 2}),
        plain_request("ack", {"lease": "1"}),
        plain_request("ack", {"lease": True}),
        plain_request("ack", {"lease": 2**63}),
        plain_request("ack", {"lease": 1.0}),
        plain_request("ack", [1]),
        plain_request("ack", {"lease": 1}, "soon"),
        *(plain_request("ack", {"lease": 1}, wait_s) for wait_s in (float("nan"), float("inf"), 1e300, -1.0)),
        plain_request(b"ack", {"lease": 1}),
        plain_request("retire", {"reader": "x" * 5000}),
        plain_request("ask", {"method": "close", "stage": "s", "reader": "r"}),
        plain_request("ask", {"method": "take", "stage": "s", "reader": "r", "kinds": ["test"]}),
        plain_request("publish", {"publish": ["me", [1, 1, 64, 8], b"123", ["c"], None, None]}),
        plain_request("publish", {"publish": ["me", [1, 1, -64, 8], b"", ["c"], None, None]}),
        plain_request("publish", {"publish": ["me", [1, 1, 64, 8], bytes(48), ["c"], None, None]}),
        plain_request("admit", {"groups": [[1, 2, "train", [1, 2, 3, 4], ["c"], None, 1, 7]]}),
        b"\xdd\xff\xff\xff\xff" + b"\x01" * 8,
        b"\x91" * 3000,
    ],
)
def test_what_is_no_message_is_refused(data):
    with pytest.raises(ValueError, match="malformed message"):
        wire.decode_request(data)


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | texts | st.binary(max_size=50),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=15,
)
methods = st.sampled_from(sorted(wire.METHODS))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200) | plain.map(msgpack.packb) | st.tuples(methods, plain, plain, plain).map(msgpack.packb))
def test_any_bytes_are_a_message_or_a_value_error(data):
    try:
        request = wire.decode_request(data)
    except ValueError:
        return
    assert request.method in wire.METHODS


@settings(max_examples=200, deadline=None)
@given(publishes, st.data())
def test_a_damaged_message_is_a_message_or_a_value_error(publish, data):
    sent = bytearray(wire.encode_request("publish", {"publish": publish}, 0.0))
    for _ in range(data.draw(st.integers(1, 4))):
        sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
    try:
        wire.decode_request(bytes(sent[: data.draw(st.integers(0, len(sent)))]))
    except ValueError:
        return


@settings(max_examples=200, deadline=None)
@given(takes, st.data())
def test_a_damaged_answer_is_an_answer_or_an_error_that_the_dock_may_give(take, data):
    sent = bytearray(wire.encode_reply("ask", Answer(take, 1, False)))
    for _ in range(data.draw(st.integers(1, 4))):
        sent[data.draw(st.integers(0, len(sent) - 1))] = data.draw(st.integers(0, 255))
    try:
        wire.decode_reply("ask", bytes(sent))
    except (ValueError, RunError, StaleLease, StaleSlab):
        return
