"""Messages come through a pipe as they were, however it cuts them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tranship.ipc import FrameReader, pack

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=10,
)


@given(messages=st.lists(VALUES, max_size=5), step=st.integers(1, 40))
def test_messages_survive_any_cutting(messages: list[Any], step: int):
    data = b"".join(pack(message) for message in messages)
    reader = FrameReader()
    found = [message for at in range(0, len(data), step) for message in reader.feed(data[at : at + step])]
    assert found == messages


def test_numbers_beyond_64_bits_and_lone_surrogates():
    message = {"a": 2**200, "b": [-(2**70)], "c": "\ud800"}
    assert list(FrameReader().feed(pack(message))) == [message]
    assert list(FrameReader().feed(pack("\ud800"))) == ["\ud800"]


def test_garbage_raises_a_value_error():
    with pytest.raises(ValueError):
        list(FrameReader().feed(b"\x02\x00\x00\x00\xc1\xc1"))
