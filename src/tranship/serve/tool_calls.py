"""Calls of tools in a growing text: what stands outside of them is given at once, they when the text has ended.

Calls are read as the environments of training read them (`<tool_call>{...}</tool_call>`, as Qwen, Hermes and SmolLM2
write them). Where one cannot be read, the text stays text, and nothing of it is lost.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

from tranship.envs.tools import parse_tool_calls

_BEGIN = "<tool_call>"
_CALL = re.compile(r"<tool_call>.*?(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)


class GrowingCalls:
    """Splits the pieces of one text into content and calls."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """(what is content for certain, the calls in OpenAI's form: none before the last piece)."""
        self._held += text
        if last:
            content, calls = _split(self._held)
            self._held = ""
            return content, calls
        certain = self._certain()
        content, self._held = self._held[:certain], self._held[certain:]
        return content, []

    def _certain(self) -> int:
        at = self._held.find(_BEGIN)
        if at >= 0:
            return at
        for size in range(min(len(_BEGIN) - 1, len(self._held)), 0, -1):
            if _BEGIN.startswith(self._held[-size:]):
                return len(self._held) - size
        return len(self._held)


def check_tools(tools: Sequence[dict[str, Any]]) -> str | None:
    """What is wrong with the tools of a request; None: nothing."""
    for tool in tools:
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, dict)
            or not isinstance(function.get("name"), str)
        ):
            return f"a tool is {json.dumps(tool)[:80]}: give type function, and function with a name"
        if function.get("strict"):
            return f"strict is not supported: nothing makes the model keep to the schema of {function['name']}"
    return None


def _split(text: str) -> tuple[str, list[dict[str, Any]]]:
    found = parse_tool_calls(text)
    if any("error" in call for call in found):
        return text, []
    return _CALL.sub("", text) if found else text, [_as_openai(call) for call in found]


def _as_openai(call: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["arguments"], ensure_ascii=False)
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call["name"], "arguments": arguments},
    }
