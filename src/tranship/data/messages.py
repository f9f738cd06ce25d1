"""Values of rows, checked and in JSON types: messages, calls of tools, tools, and whatever a reward wants."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tranship.types import UserError

# Columns in which a null stands for nothing.
CONVERSATION = ("prompt", "messages", "completion", "chosen", "rejected", "tools")


def to_json(value: Any, where: str) -> Any:
    """`value` in JSON types (numpy and arrow values become Python's). Raises UserError for what has no such form."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, np.generic):
        return to_json(value.item(), where)
    if isinstance(value, np.ndarray):
        return to_json(value.tolist(), where)
    if isinstance(value, Mapping):
        return {str(key): to_json(entry, f"{where}.{key}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(entry, where) for entry in value]
    raise UserError(f"{where}: a {type(value).__name__} is not a JSON value: store it as text or a number")


def without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """`row` of an arrow table, less the nulls inside its messages and tools.

    A table gives each object every key that any object of its column has; a null there stands for no key.
    """
    return {key: _strip(value) if key in CONVERSATION else value for key, value in row.items()}


def to_messages(value: Any, column: str, where: str) -> list[dict[str, Any]]:
    """The messages of a column, with string contents, no nulls, and calls of tools as templates read them.

    Raises UserError naming the place, the column and what is wrong.
    """
    messages = to_json(value, f"{where}: column {column}")
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: column {column} is {kind(messages)}, not a string or a list of messages")
    return [_message(message, column, where) for message in messages]


def to_tools(value: Any, where: str) -> tuple[dict[str, Any], ...]:
    """The JSON schemas of a column `tools`: a list of objects, or JSON text of one or of its entries."""
    if value is None or value == "":
        return ()
    place = f"{where}: column tools"
    tools = _parsed(to_json(value, place), place)
    if not isinstance(tools, list):
        raise UserError(f"{place} is {kind(tools)}, not a list of JSON schemas")
    schemas = [_parsed(tool, place) for tool in tools]
    for schema in schemas:
        if not isinstance(schema, dict):
            raise UserError(f"{place}: a tool is a JSON schema, not {kind(schema)}")
    return tuple(schemas)


def kind(value: Any) -> str:
    """Type and beginning of a value, for errors."""
    return f"{type(value).__name__} {value!r:.40}"


def _message(message: Any, column: str, where: str) -> dict[str, Any]:
    place = f"{where}: column {column}"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError(f"{place}: a message is an object with role and content, not {message!r:.80}")
    present = {key: value for key, value in message.items() if value is not None}
    if present.get("tool_calls"):
        present["tool_calls"] = _tool_calls(present["tool_calls"], place)
        present.setdefault("content", "")
    else:
        present.pop("tool_calls", None)
    if not isinstance(present.get("content"), str):
        raise UserError(
            f"{place}: the content of the {message['role']} message is {kind(message.get('content'))}, not a string"
        )
    return present


def _tool_calls(value: Any, place: str) -> list[dict[str, Any]]:
    """Calls as templates read them: arguments as an object (OpenAI's form has them as JSON text)."""
    calls = value if isinstance(value, Sequence) and not isinstance(value, str) else None
    if calls is None or not all(isinstance(call, dict) for call in calls):
        raise UserError(f"{place}: tool_calls is {kind(value)}, not a list of objects")
    found = []
    for call in calls:
        inner = call.get("function", call)
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            raise UserError(f"{place}: a tool call has a name and arguments, not {call!r:.80}")
        arguments = _parsed(inner.get("arguments", {}), f"{place}: arguments of the call of {inner['name']}")
        if not isinstance(arguments, dict):
            raise UserError(f"{place}: the arguments of a call of {inner['name']} are {kind(arguments)}, no object")
        inner = {**inner, "arguments": arguments}
        found.append({**call, "function": inner} if "function" in call else inner)
    return found


def _strip(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _strip(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_strip(entry) for entry in value]
    return value


def _parsed(value: Any, place: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise UserError(f"{place}: broken JSON ({error.msg}, column {error.colno})") from error
