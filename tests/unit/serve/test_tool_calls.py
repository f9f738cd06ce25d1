"""Calls of tools out of a text that grows: content at once, calls at the end, nothing lost."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tranship.serve.tool_calls import GrowingCalls, check_tools

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "é"}}\n</tool_call>'
HALF = '<tool_call>{"name": "add", "arguments": {"a": "\\ud800"}}</tool_call>'


def grown(text: str, cuts: list[int]) -> tuple[str, list[dict[str, Any]]]:
    calls, content, at = GrowingCalls(), "", 0
    for cut in cuts:
        more, found = calls.push(text[at : at + cut], last=False)
        assert not found
        content, at = content + more, at + cut
    more, found = calls.push(text[at:], last=True)
    return content + more, found


@given(cuts=st.lists(st.integers(1, 9), max_size=40))
@pytest.mark.parametrize(
    ("text", "content", "num"),
    [
        ("no call, but 1 <tool_ and <tool", "no call, but 1 <tool_ and <tool", 0),
        (CALL, "", 1),
        (f"Let me see.{CALL}{CALL}", "Let me see.", 2),
        (f"a {CALL} b", "a  b", 1),
        (CALL.removesuffix("</tool_call>"), "", 1),
        ("a <tool_call>{broken", "a <tool_call>{broken", 0),
        (f"{CALL}<tool_call>[]</tool_call>", f"{CALL}<tool_call>[]</tool_call>", 0),
        ("", "", 0),
        (HALF, HALF, 0),
    ],
)
def test_content_and_calls(text: str, content: str, num: int, cuts: list[int]) -> None:
    said, calls = grown(text, cuts)
    assert said == content
    assert len({call["id"] for call in calls}) == len(calls) == num
    for call in calls:
        assert call["type"] == "function"
        assert call["function"]["name"] == "add"
        assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": "é"}


def test_content_comes_at_once() -> None:
    calls = GrowingCalls()
    assert [calls.push(text, last=False)[0] for text in ("Well", ", 1 <", " 2 <tool", "ish <tool_call>{", "x")] == [
        "Well",
        ", 1 ",
        "< 2 ",
        "<toolish ",
        "",
    ]


def test_tools_that_are_refused() -> None:
    assert check_tools([{"type": "function", "function": {"name": "f", "parameters": {}}}]) is None
    for tool in (
        {},
        {"type": "function"},
        {"type": "custom", "custom": {"name": "f"}},
        {"type": "function", "function": {}},
    ):
        assert "give type function" in (check_tools([tool]) or "")
    assert "strict is not supported" in (
        check_tools([{"type": "function", "function": {"name": "f", "strict": True}}]) or ""
    )
