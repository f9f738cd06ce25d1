"""What ranks tell each other comes back equal; other bytes are refused."""

from dataclasses import replace

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tranship.rollout import GroupRequest
from tranship.rollout.native import told
from tranship.rollout.native.leader import _METHODS
from tranship.types import Response, SampleId, Sampling

IDS = (SampleId(2**40, 0, 1), SampleId(2**40, 1, 0))
MADE = Response(
    IDS[1], np.array([5, 6], np.int32), np.array([-0.1, -2.5], np.float32), np.array([3, 4], np.int32), "abort"
)
HOW = Sampling(20, 0.7, 0.9, 50, 0.01, (7, 9), ("ab", "\u00e9\n"), 0)


def there_and_back(name, *values):
    return told.unpack(told.pack(name, *values), _METHODS)


@pytest.mark.parametrize("partials", [None, {}, {IDS[1]: MADE}])
def test_a_request_comes_back_equal(partials):
    sent = GroupRequest(np.array([1, 2, 3], np.int64), IDS, (2**64 - 1, 0), HOW, partials, goes_on=True)
    name, (got,) = there_and_back("submit", sent)
    assert (name, got.samples, got.seeds, got.sampling, got.goes_on) == ("submit", IDS, sent.seeds, HOW, True)
    assert got.prompt_ids.dtype == np.int32
    assert got.prompt_ids.tolist() == [1, 2, 3]
    assert (got.partials is None) == (partials is None)
    assert list(got.partials or {}) == list(partials or {})
    for made in (got.partials or {}).values():
        assert (made.sample, made.finish_reason) == (MADE.sample, "abort")
        for field in ("token_ids", "logprobs", "policy_versions"):
            assert getattr(made, field).tobytes() == getattr(MADE, field).tobytes()
            assert getattr(made, field).dtype == getattr(MADE, field).dtype


def test_others_do_not_report_the_likeliest_tokens():
    sent = GroupRequest(np.arange(3), IDS, (0, 1), replace(HOW, top_logprobs=5))
    assert there_and_back("submit", sent)[1][0].sampling == HOW


def test_all_else_comes_back_equal():
    assert there_and_back("meet", "127.0.0.1", 80) == ("meet", ("127.0.0.1", 80))
    assert there_and_back("abort", None) == ("abort", (None,))
    assert there_and_back("abort", list(IDS)) == ("abort", (IDS,))
    _, (ids, temperature) = there_and_back("probe", np.array([4, 5], np.int32), 0.5)
    assert (ids.tolist(), temperature) == ([4, 5], 0.5)


@pytest.mark.parametrize(
    "words",
    [
        ["exec", []],
        ["step", [1, 2]],
        ["step", [1, 2, "3"]],
        ["step", [1, 2, True]],
        ["probe", [b"123", 1.0]],
        ["submit", [[b"", [], [], [], None]]],
        ["abort", [[[1, 2]]]],
        [["step"], [1, 2, 3]],
        7,
    ],
)
def test_other_words_are_refused(words):
    with pytest.raises(ValueError, match="malformed"):
        told.unpack(msgpack.packb(words), _METHODS)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_words_or_refused(data):
    try:
        name, values = told.unpack(data, _METHODS)
    except ValueError:
        return
    assert len(values) == len(_METHODS[name])


def test_what_is_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(told, "MAX_BYTES", 100)
    with pytest.raises(ValueError, match=r"probe of .* bytes is over the limit of 100"):
        told.pack("probe", np.zeros(100, np.int32), 1.0)
