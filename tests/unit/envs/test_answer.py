"""Whatever a session's process writes becomes an answer or a reason, never an exception in the pool."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tranship.envs.answer import Answer, to_answer

WORDS = st.text(st.characters(categories=["L", "Cs", "Zs"]), max_size=4)  # Cs: half a character, as JSON allows it
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(2**62, 2**66) | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(["messages", "reward", "done", "info", "error", "other"])
MESSAGES = st.fixed_dictionaries({"role": st.sampled_from(["tool", "user"]), "content": WORDS})


@settings(max_examples=200, deadline=None)
@given(JSON | st.dictionaries(FIELDS, JSON | st.lists(MESSAGES, max_size=2), max_size=5))
def test_anything_is_an_answer_or_has_a_reason(message: Any) -> None:
    answer = to_answer(message, 1.5)
    assert answer.seconds == 1.5
    if answer.error is not None:
        assert answer.error
        assert (answer.messages, answer.reward, answer.done, answer.info) == ([], None, False, {})
        return
    assert answer.reward is None or math.isfinite(answer.reward)
    assert all(m["role"] in ("tool", "user") and isinstance(m["content"], str) for m in answer.messages)
    msgpack.packb([answer.messages, answer.info])


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), "1", [1], 10**400])
def test_a_reward_is_a_finite_number(reward: Any) -> None:
    assert "is no finite number" in (to_answer({"messages": [], "reward": reward}, 0.0).error or "")


def test_a_whole_answer_is_kept() -> None:
    said = [{"role": "tool", "name": "f", "content": "4"}]
    message = {"messages": said, "reward": 1, "done": True, "info": {"tool_calls": 1}}
    assert to_answer(message, 0.5) == Answer(said, 1.0, True, {"tool_calls": 1}, None, 0.5)
