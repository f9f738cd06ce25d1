"""Tools that a model calls: typed Python functions, their schemas, the calls in a model's text, and running them.

A call stands in the text as Qwen, Hermes and SmolLM2 write it, any number of times:

    <tool_call>
    {"name": "multiply", "arguments": {"a": 6, "b": 7}}
    </tool_call>
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pydantic

from tranship.envs.env import Message, Step
from tranship.types import UserError

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_ARGUMENT = re.compile(r"^\s*(\w+)(?:\s*\([^)]*\))?\s*:\s*(.+)$")
_SECTION = re.compile(r"^\s*(args|arguments|parameters|returns|raises|yields|examples?)\s*:\s*$", re.IGNORECASE)


class ToolError(Exception):
    """What went wrong with a call, in words for the model."""


def parse_tool_calls(text: str) -> list[dict[str, Any]]:
    """The calls in a model's text, in order: {name, arguments}, or {error} for one that cannot be read.

    The last one may lack its closing tag (the turn may end with it).
    """
    return [_parse_call(match[1]) for match in _CALL.finditer(text)]


def _parse_call(body: str) -> dict[str, Any]:
    try:
        call = json.loads(body)
        # A lone half of a surrogate pair can be written in JSON, and sent nowhere.
        json.dumps(call, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        return {"error": f"the call is no valid JSON: {error}"}
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return {"error": 'a call is an object with "name" and "arguments"'}
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return {"error": f'"arguments" of {call["name"]} is not an object'}
    return {"name": call["name"], "arguments": arguments}


class Tool:
    """A Python function as a model sees it: `schema` (JSON schema in the form of chat templates), and `run`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises UserError where a parameter has no type, or the function no name or docstring."""
        self.name = getattr(function, "__name__", "")
        doc = inspect.getdoc(function) or ""
        if not self.name.isidentifier() or not doc:
            raise UserError(
                f"env tool {self.name or function!r}: it needs a name and a docstring, which the model reads"
            )
        self._function = function
        summary, described = _read_doc(doc)
        self._arguments, parameters = _arguments_model(function, self.name, described)
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {
                "name": self.name,
                "description": summary,
                "parameters": parameters,
            },
        }

    def run(self, arguments: Mapping[str, Any]) -> str:
        """The result as text (JSON where it is no string). Raises ToolError for wrong arguments, and what it raised."""
        try:
            checked = self._arguments.model_validate_json(json.dumps(arguments))
        except pydantic.ValidationError as error:
            faults = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'arguments'}: {e['msg']}" for e in error.errors())
            raise ToolError(f"wrong arguments of {self.name}: {faults}") from error
        given = {name: getattr(checked, name) for name in type(checked).model_fields}
        try:
            result = self._function(**given)
        except Exception as error:
            raise ToolError(
                str(error) if isinstance(error, ToolError) else f"{type(error).__name__}: {error}"
            ) from error
        return result if isinstance(result, str) else json.dumps(result, default=str)


class ToolEnv:
    """An environment whose turns are tool calls: `tools` are run, what they return is the model's next observation.

    A turn without a call is the model's answer: `finish` says what it is worth, and the sample ends. Errors of a call
    (unknown name, wrong arguments, an exception) become text for the model, and are counted. To make one, give `tools`
    (functions or methods), override `begin` and `finish`.
    """

    tools: Sequence[Callable[..., Any]] = ()
    roles: Sequence[str] = ("tool",)

    def begin(self, prompt_info: dict[str, Any], seed: int) -> None:
        """Note what a sample needs: the ground truth, a state that tools change."""

    def finish(self, answer: str) -> float | None:
        """The reward of the model's last text; None: none from here (a reward function gives it)."""
        return None

    def reset(self, prompt_info: dict[str, Any], seed: int) -> list[Message]:
        """See `Env.reset`."""
        self._by_name = {tool.name: tool for tool in map(Tool, self.tools)}
        self.begin(prompt_info, seed)
        return []

    def step(self, message: Message) -> Step:
        """See `Env.step`."""
        calls = message["tool_calls"]
        if not calls:
            return Step(reward=self.finish(message["content"]), done=True)
        answers, errors = [], 0
        for call in calls:
            try:
                content = self._run(call)
            except ToolError as error:
                content, errors = f"Error: {error}", errors + 1
            name = {"name": call["name"]} if "name" in call else {}
            answers.append({"role": "tool", **name, "content": content})
        return Step(answers, info={"tool_calls": len(calls), "tool_errors": errors})

    def _run(self, call: Mapping[str, Any]) -> str:
        if "error" in call:
            raise ToolError(call["error"])
        if call["name"] not in self._by_name:
            raise ToolError(f"there is no tool {call['name']!r}; there are: {', '.join(self._by_name)}")
        return self._by_name[call["name"]].run(call["arguments"])


def tools_text(schemas: Sequence[Mapping[str, Any]]) -> str:
    """What a system prompt says of tools, for chat templates that do not read `tools`."""
    lines = "\n".join(json.dumps(schema["function"]) for schema in schemas)
    return (
        f"You can call these tools:\n{lines}\n"
        "To call one, write a JSON object with its name and arguments between tags, and end your turn:\n"
        '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": VALUE}}\n</tool_call>\n'
        "The next message brings its result. Answer without a call when you know the answer."
    )


def _arguments_model(
    function: Callable[..., Any], name: str, described: Mapping[str, str]
) -> tuple[type[pydantic.BaseModel], dict[str, Any]]:
    """What checks a call's arguments, and their JSON schema."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise UserError(f"env tool {name}: its type annotations do not resolve: {error}") from error
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise UserError(f"env tool {name}: parameter {parameter.name!r} is {parameter.kind.description}: name it")
        if parameter.name not in hints:
            raise UserError(f"env tool {name}: parameter {parameter.name!r} has no type: annotate it")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (
            hints[parameter.name],
            pydantic.Field(default, description=described.get(parameter.name)),
        )
    config = pydantic.ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=False)
    try:
        model = pydantic.create_model(name, __config__=config, **fields)
        return model, _plain_schema(model.model_json_schema())
    except (pydantic.PydanticUserError, NameError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"env tool {name}: a parameter's type has no JSON form: {first}") from error


def _read_doc(doc: str) -> tuple[str, dict[str, str]]:
    """The text before the first section of a docstring, and the lines `name: text` under its Args."""
    summary: list[str] = []
    described: dict[str, str] = {}
    section: str | None = None
    for line in doc.splitlines():
        if heading := _SECTION.match(line):
            section = heading[1].lower()
        elif section is None:
            summary.append(line)
        elif section in ("args", "arguments", "parameters") and (match := _ARGUMENT.match(line)):
            described[match[1]] = match[2].strip()
    return "\n".join(summary).strip(), described


def _plain_schema(schema: Any) -> Any:
    """The schema without the titles that pydantic makes up."""
    if isinstance(schema, list):
        return [_plain_schema(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {}
    for key, value in schema.items():
        if key == "properties":
            plain[key] = {name: _plain_schema(entry) for name, entry in value.items()}
        elif not (key == "title" and isinstance(value, str)) and not (key == "additionalProperties" and value is False):
            plain[key] = _plain_schema(value)
    return plain
