"""Rows in verl's schema or TRL's, checked and in JSON values: what every prompt source gives, whatever it is read from.

How a row is recognised: it is verl's where it has a column `reward_model` or `data_source` (then it needs both, and
`prompt`), and TRL's otherwise (`prompt`, `messages`, or `chosen` and `rejected`). In either, recorded responses are the
columns `messages` (all from the first assistant message on), `prompt` and `completion` (a demonstration), or `chosen`
and `rejected` (a preference; without a `prompt`, the messages that both begin with are the prompt). Two of these three
at once are refused, and so is a source whose rows do not all follow the schema of its first row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tranship.data.messages import CONVERSATION, kind, to_json, to_messages, to_tools
from tranship.types import UserError

Text = str | list[dict[str, Any]]
Schema = Literal["verl", "TRL"]

_TRUTHS = ("solution", "answer", "ground_truth")
# Columns that change the prompt in other programs, and that nothing here would read.
_UNREAD = {
    "chat_template_kwargs": "use data.template_args",
    "images": "only text is read",
    "image": "only text is read",
    "videos": "only text is read",
}


@dataclass(frozen=True)
class Row:
    """One checked row.

    prompt: messages (dicts with role and content), or a string. where: file and line, for errors. responses: none, a
    demonstration, or chosen and rejected; each a string (where the prompt is one) or the messages that follow the
    prompt. tools: JSON schemas. left_out: columns that have no JSON form.
    """

    where: str
    prompt: Text
    data_source: str
    ground_truth: Any
    ability: str = ""
    extra_info: dict[str, Any] = field(default_factory=dict)
    tools: tuple[dict[str, Any], ...] = ()
    responses: tuple[Text, ...] = ()
    schema: Schema = "verl"
    left_out: tuple[str, ...] = ()


def to_row(raw: Any, where: str, name: str = "") -> Row:
    """`raw` as a Row; name: the source's own, which is the data_source of rows in TRL's schema.

    verl's columns: data_source, prompt, ability, reward_model{style, ground_truth}, extra_info; further ones are left
    out. TRL's: the ground truth is the column solution, answer or ground_truth (null where there is none), and all
    other columns go into extra_info. Raises UserError naming the place and the column that is missing, has the wrong
    type, or makes the row ambiguous.
    """
    if not isinstance(raw, Mapping):
        raise UserError(f"{where}: the row is {kind(raw)}, not an object with the columns prompt, data_source, ...")
    given = {str(key) for key, value in raw.items() if value is not None}
    schema: Schema = "verl" if {"reward_model", "data_source"} & given else "TRL"
    for column in sorted(given & _UNREAD.keys()):
        raise UserError(f"{where}: column {column!r} is not read: {_UNREAD[column]}, and take the column out")
    prompt, responses = _conversation(raw, given, where)
    tools = to_tools(raw.get("tools"), where)
    if schema == "TRL":
        extra_info, left_out = _further(raw, where)
        return Row(
            where=where,
            prompt=prompt,
            data_source=name,
            ground_truth=_trl_truth(raw, given, where),
            extra_info=extra_info,
            tools=tools,
            responses=responses,
            schema=schema,
            left_out=left_out,
        )
    return Row(
        where=where,
        prompt=prompt,
        data_source=_text(_column(raw, "data_source", where), f"{where}: column data_source"),
        ground_truth=_ground_truth(_column(raw, "reward_model", where), where),
        ability=_text(raw.get("ability") or "", f"{where}: column ability"),
        extra_info=_object(raw.get("extra_info"), f"{where}: column extra_info"),
        tools=tools,
        responses=responses,
    )


def _conversation(raw: Mapping[str, Any], given: set[str], where: str) -> tuple[Text, tuple[Text, ...]]:
    """The row's prompt and recorded responses."""
    ways = [way for way in ({"messages"}, {"completion"}, {"chosen", "rejected"}) if way & given]
    if len(ways) > 1:
        found = ", ".join(sorted(given & {"messages", "completion", "chosen", "rejected"}))
        raise UserError(f"{where}: columns {found}: keep messages, completion, or chosen and rejected, not several")
    if "messages" in given:
        if "prompt" in given:
            raise UserError(f"{where}: columns messages and prompt: messages is a whole conversation; keep one of them")
        return _split_conversation(to_messages(raw["messages"], "messages", where), where)
    if "completion" in given:
        prompt = _prompt(_column(raw, "prompt", where), where)
        return prompt, (_response(raw["completion"], prompt, "completion", where),)
    if {"chosen", "rejected"} & given:
        return _preference(raw, given, where)
    return _prompt(_column(raw, "prompt", where), where), ()


def _split_conversation(messages: list[dict[str, Any]], where: str) -> tuple[Text, tuple[Text, ...]]:
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    if first == 0:
        raise UserError(f"{where}: column messages begins with the assistant: something must come before")
    return messages[:first], ((messages[first:],) if first < len(messages) else ())


def _preference(raw: Mapping[str, Any], given: set[str], where: str) -> tuple[Text, tuple[Text, ...]]:
    for column in ("chosen", "rejected"):
        if column not in given:
            raise UserError(f"{where}: column {column!r} is missing or empty: a preference has chosen and rejected")
    if "prompt" in given:
        prompt = _prompt(raw["prompt"], where)
        return prompt, tuple(_response(raw[column], prompt, column, where) for column in ("chosen", "rejected"))
    if isinstance(raw["chosen"], str) or isinstance(raw["rejected"], str):
        raise UserError(f"{where}: chosen and rejected are text, so the row needs a column prompt")
    chosen, rejected = (to_messages(raw[column], column, where) for column in ("chosen", "rejected"))
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    # The same conversation twice: its last message is what would have been compared.
    shared = min(shared, len(chosen) - 1, len(rejected) - 1)
    if not shared:
        raise UserError(f"{where}: chosen and rejected begin with different messages: give the prompt as a column")
    for column, messages in (("chosen", chosen), ("rejected", rejected)):
        if messages[shared]["role"] != "assistant":
            raise UserError(
                f"{where}: after what chosen and rejected share, {column} goes on with a {messages[shared]['role']} "
                "message: they may only differ from an assistant message on"
            )
    return chosen[:shared], (chosen[shared:], rejected[shared:])


def _response(value: Any, prompt: Text, column: str, where: str) -> Text:
    if isinstance(value, str) != isinstance(prompt, str):
        raise UserError(f"{where}: one of prompt and {column} is text and the other messages: give both alike")
    if isinstance(value, str):
        return value
    messages = to_messages(value, column, where)
    # Some data sets repeat the prompt in front of each response.
    if len(messages) > len(prompt) and messages[: len(prompt)] == prompt:
        messages = messages[len(prompt) :]
    if messages[0]["role"] != "assistant":
        raise UserError(f"{where}: column {column} begins with a {messages[0]['role']} message, not the assistant's")
    return messages


def _trl_truth(raw: Mapping[str, Any], given: set[str], where: str) -> Any:
    found = [column for column in _TRUTHS if column in given]
    if len(found) > 1:
        raise UserError(f"{where}: columns {' and '.join(found)}: which is the ground truth? Rename all but one")
    return _truth(raw[found[0]], f"{where}: column {found[0]}") if found else None


def _truth(value: Any, where: str) -> Any:
    truth = to_json(value, where)
    if isinstance(truth, float) and math.isnan(truth):
        raise UserError(f"{where} is NaN, which no answer equals: give the ground truth, or null")
    return truth


def _further(raw: Mapping[str, Any], where: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The other columns that have a JSON form, and the names of those that have none."""
    values, left_out = {}, []
    for key, value in raw.items():
        if key in CONVERSATION or key in _TRUTHS:
            continue
        try:
            values[str(key)] = to_json(value, where)
        except UserError:
            left_out.append(str(key))
    return values, tuple(left_out)


def _column(raw: Mapping[str, Any], name: str, where: str) -> Any:
    if raw.get(name) is None:
        found = ", ".join(str(key) for key in raw) or "none"
        raise UserError(
            f"{where}: column {name!r} is missing or empty (columns: {found}): rows follow verl's schema (prompt, "
            "data_source, reward_model) or TRL's (prompt, messages, or chosen and rejected)"
        )
    return raw[name]


def _prompt(value: Any, where: str) -> Text:
    if isinstance(value, str):
        if not value:
            raise UserError(f"{where}: column prompt is an empty string")
        return value
    return to_messages(value, "prompt", where)


def _ground_truth(value: Any, where: str) -> Any:
    reward_model = _object(value, f"{where}: column reward_model")
    if "ground_truth" not in reward_model:
        found = ", ".join(reward_model) or "none"
        raise UserError(f"{where}: column reward_model has no ground_truth (keys: {found}): add it, null if unused")
    return _truth(reward_model["ground_truth"], f"{where}: column reward_model.ground_truth")


def _object(value: Any, where: str) -> dict[str, Any]:
    if value is None:
        return {}
    result = to_json(value, where)
    if not isinstance(result, dict):
        raise UserError(f"{where} is {kind(result)}, not an object")
    return result


def _text(value: Any, where: str) -> str:
    result = to_json(value, where)
    if not isinstance(result, str):
        raise UserError(f"{where} is {kind(result)}, not a string")
    return result
