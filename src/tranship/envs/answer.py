"""What comes out of a session, checked: nothing that an environment's process writes is trusted."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

_INT64 = 2**63
_MAX_DEPTH = 8


@dataclass(frozen=True)
class EnvSpec:
    """What a model has to know of an environment: its tools' JSON schemas, and the roles of its messages."""

    tools: tuple[dict[str, Any], ...]
    roles: tuple[str, ...]


@dataclass(frozen=True)
class Answer:
    """What came of one request. error: why the session is over (the rest is then empty). seconds: it took."""

    messages: list[dict[str, str]] = field(default_factory=list)
    reward: float | None = None
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    seconds: float = 0.0


def to_answer(message: Any, seconds: float) -> Answer:
    """What a session sent (JSON values) as an Answer; with an error where it is none.

    Texts come out as valid Unicode (lone surrogates become "?").
    """
    if not isinstance(message, dict):
        return Answer(error="the session wrote something else than an answer", seconds=seconds)
    if "error" in message:
        return Answer(error=" ".join(_text(str(message["error"])).split()) or "no reason given", seconds=seconds)
    messages, reward, info = message.get("messages"), message.get("reward"), message.get("info") or {}
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        return Answer(error="messages have to be dicts with role (tool, user) and content, a string", seconds=seconds)
    if not _is_reward(reward):
        return Answer(error=f"the reward, a {type(reward).__name__}, is no finite number", seconds=seconds)
    if not isinstance(info, dict) or not _is_plain(info):
        return Answer(error="info has to be a dict of JSON values, with whole numbers of 64 bits", seconds=seconds)
    said = [{key: _text(entry[key]) for key in ("role", "name", "content") if key in entry} for entry in messages]
    value = None if reward is None else float(reward)
    return Answer(said, value, bool(message.get("done")), _clean(info), None, seconds)


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") in ("tool", "user")
        and isinstance(message.get("content"), str)
        and isinstance(message.get("name", ""), str)
    )


def _is_reward(value: Any) -> bool:
    if isinstance(value, int):
        return -_INT64 <= value < _INT64
    return value is None or (isinstance(value, float) and math.isfinite(value))


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Whether the dock and the trackers can carry a JSON value."""
    if isinstance(value, dict | list):
        entries = value.values() if isinstance(value, dict) else value
        return depth < _MAX_DEPTH and all(_is_plain(entry, depth + 1) for entry in entries)
    return not isinstance(value, int) or -_INT64 <= value < _INT64


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list):
        return [_clean(entry) for entry in value]
    if isinstance(value, dict):
        return {_text(key): _clean(entry) for key, entry in value.items()}
    return value


def _text(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
