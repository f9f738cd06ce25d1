"""Tools: what the model is told of them, what is read from its text, and what it is told when a call is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tranship.envs import ToolEnv, ToolError, tools_text
from tranship.envs.tools import Tool, parse_tool_calls
from tranship.types import UserError


def book(city: str, nights: int, kind: Literal["room", "suite"] = "room", tags: list[str] | None = None) -> dict:
    """Book a hotel.

    The second paragraph belongs to it.

    Args:
        city: where to
        nights (int): how long, in nights
        tags: anything: with a colon

    Returns:
        nothing that the model is told
    """
    if nights == 13:
        raise ValueError("an unlucky number")
    return {"city": city, "nights": nights, "kind": kind, "tags": tags}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_a_schema_says_name_words_types_and_defaults() -> None:
    assert Tool(book).schema == {
        "type": "function",
        "function": {
            "name": "book",
            "description": "Book a hotel.\n\nThe second paragraph belongs to it.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "where to"},
                    "nights": {"type": "integer", "description": "how long, in nights"},
                    "kind": {"type": "string", "enum": ["room", "suite"], "default": "room"},
                    "tags": {
                        "anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}],
                        "default": None,
                        "description": "anything: with a colon",
                    },
                },
                "required": ["city", "nights"],
            },
        },
    }


def test_arguments_are_checked_not_converted() -> None:
    tool = Tool(book)
    assert json.loads(tool.run({"city": "Ulm", "nights": 2})) == {
        "city": "Ulm",
        "nights": 2,
        "kind": "room",
        "tags": None,
    }
    for wrong, words in (
        ({"city": "Ulm"}, "nights: Field required"),
        ({"city": "Ulm", "nights": "2"}, "nights: Input should be a valid integer"),
        ({"city": "Ulm", "nights": True}, "nights: Input should be a valid integer"),
        ({"city": "Ulm", "nights": 2, "kind": "tent"}, "kind: Input should be 'room' or 'suite'"),
        ({"city": "Ulm", "nights": 2, "stars": 5}, "stars: Extra inputs are not permitted"),
        ({"city": "Ulm", "nights": 13}, "ValueError: an unlucky number"),
    ):
        with pytest.raises(ToolError) as caught:
            tool.run(wrong)
        assert words in str(caught.value)


def nameless(a: int) -> int:
    return a


def untyped(a) -> int:
    """Something."""
    return a


def open_ended(**a: int) -> int:
    """Something."""
    return len(a)


def formless(a: Callable[[], int]) -> int:
    """Something."""
    return a()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (nameless, "docstring"),
        (lambda a: a, "name and a docstring"),
        (untyped, "'a' has no type"),
        (open_ended, "variadic"),
        (formless, "no JSON form"),
    ],
)
def test_a_function_that_cannot_be_told_to_a_model_is_refused(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Tool(function)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("No call at all.", []),
        (call("add", a=1), [{"name": "add", "arguments": {"a": 1}}]),
        (
            f"First {call('a')} then {call('b', x=[1])} end",
            [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {"x": [1]}}],
        ),
        ('<tool_call>{"name": "a", "arguments": {}}', [{"name": "a", "arguments": {}}]),
        ('<tool_call>{"name": "a"}</tool_call>', [{"name": "a", "arguments": {}}]),
        (
            '<tool_call>{"name": "a"}<tool_call>{"name": "b"}</tool_call>',
            [{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}],
        ),
    ],
)
def test_calls_are_found_in_a_text(text: str, calls: list[dict[str, Any]]) -> None:
    assert parse_tool_calls(text) == calls


@pytest.mark.parametrize(
    "body", ["", "{", "[]", "3", '{"name": 3}', '{"arguments": {}}', '{"name": "a", "arguments": [1]}', "[" * 100_000]
)
def test_a_call_that_cannot_be_read_is_an_error_not_a_failure(body: str) -> None:
    (found,) = parse_tool_calls(f"<tool_call>{body}</tool_call>")
    assert list(found) == ["error"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "a"}', "x", "\n", "{", '"'])))
def test_any_text_is_read(parts: list[str]) -> None:
    text = "".join(parts)
    calls = parse_tool_calls(text)
    assert len(calls) <= text.count("<tool_call>")
    assert ("<tool_call>" in text) == bool(calls)


class Hotel(ToolEnv):
    """Books, then answers."""

    def __init__(self) -> None:
        self.tools = [book]

    def finish(self, answer: str) -> float:
        return float(answer == "done")


def step(env: ToolEnv, text: str) -> Any:
    return env.step({"role": "assistant", "content": text, "tool_calls": parse_tool_calls(text), "finish_reason": ""})


def test_a_tool_env_answers_each_call_and_counts_errors() -> None:
    env = Hotel()
    assert env.reset({}, 0) == []
    text = call("book", city="Ulm", nights=1) + call("book", city="Ulm") + call("fly") + "<tool_call>{</tool_call>"
    said = step(env, text)
    assert [message["role"] for message in said.messages] == ["tool"] * 4
    assert [message.get("name") for message in said.messages] == ["book", "book", "fly", None]
    contents = [message["content"] for message in said.messages]
    assert json.loads(contents[0])["city"] == "Ulm"
    assert contents[1].startswith("Error: wrong arguments of book: nights")
    assert contents[2] == "Error: there is no tool 'fly'; there are: book"
    assert contents[3].startswith("Error: the call is no valid JSON")
    assert (said.info, said.reward, said.done) == ({"tool_calls": 4, "tool_errors": 3}, None, False)
    assert (step(env, "done").reward, step(env, "done").done) == (1.0, True)
    assert step(env, "hm").reward == 0.0


def test_tools_are_described_for_templates_that_do_not_know_them() -> None:
    text = tools_text([Tool(book).schema])
    assert json.loads(text.splitlines()[1])["name"] == "book"
    (example,) = parse_tool_calls(text.replace("VALUE", "3").replace('"ARGUMENT"', '"a"'))
    assert example["name"] == "NAME"
