"""Rows in verl's schema, checked and in JSON values: what every prompt source gives, whatever it is read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tranship.types import UserError


@dataclass(frozen=True)
class Row:
    """One checked row.

    prompt: messages (dicts with role and content), or a string. where: file and line, for errors.
    """

    where: str
    prompt: str | list[dict[str, Any]]
    data_source: str
    ground_truth: Any
    ability: str = ""
    extra_info: dict[str, Any] = field(default_factory=dict)


def to_row(raw: Any, where: str) -> Row:
    """`raw` (data_source, prompt, ability, reward_model{style, ground_truth}, extra_info) as a Row.

    Raises UserError naming the place and the column that is missing or has the wrong type. Further columns are left
    out.
    """
    if not isinstance(raw, Mapping):
        raise UserError(f"{where}: the row is {_kind(raw)}, not an object with the columns prompt, data_source, ...")
    return Row(
        where=where,
        prompt=_prompt(_column(raw, "prompt", where), where),
        data_source=_text(_column(raw, "data_source", where), f"{where}: column data_source"),
        ground_truth=_ground_truth(_column(raw, "reward_model", where), where),
        ability=_text(raw.get("ability") or "", f"{where}: column ability"),
        extra_info=_object(raw.get("extra_info"), f"{where}: column extra_info"),
    )


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


def _column(raw: Mapping[str, Any], name: str, where: str) -> Any:
    if raw.get(name) is None:
        found = ", ".join(str(key) for key in raw) or "none"
        raise UserError(f"{where}: column {name!r} is missing or empty (columns: {found}): rows follow verl's schema")
    return raw[name]


def _prompt(value: Any, where: str) -> str | list[dict[str, Any]]:
    prompt = to_json(value, f"{where}: column prompt")
    if isinstance(prompt, str):
        if not prompt:
            raise UserError(f"{where}: column prompt is an empty string")
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise UserError(f"{where}: column prompt is {_kind(prompt)}, not a string or a list of messages")
    return [_message(message, where) for message in prompt]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError(f"{where}: column prompt: a message is an object with role and content, not {message!r:.80}")
    if not isinstance(message.get("content"), str):
        raise UserError(
            f"{where}: column prompt: the content of the {message['role']} message is {_kind(message.get('content'))}, "
            "not a string"
        )
    # Parquet gives every message every key that any message has.
    return {key: value for key, value in message.items() if value is not None}


def _ground_truth(value: Any, where: str) -> Any:
    reward_model = _object(value, f"{where}: column reward_model")
    if "ground_truth" not in reward_model:
        found = ", ".join(reward_model) or "none"
        raise UserError(f"{where}: column reward_model has no ground_truth (keys: {found}): add it, null if unused")
    return reward_model["ground_truth"]


def _object(value: Any, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    result = to_json(value, where)
    if not isinstance(result, dict):
        raise UserError(f"{where} is {_kind(result)}, not an object")
    return result


def _text(value: Any, where: str) -> str:
    result = to_json(value, where)
    if not isinstance(result, str):
        raise UserError(f"{where} is {_kind(result)}, not a string")
    return result


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.40}"
