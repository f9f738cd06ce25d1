"""Recipes to configurations and back: YAML, overrides, and errors in one line that name key, value and remedy."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tranship.config import yaml_text
from tranship.config.keys import KEYS, is_tuple, items_section, owner, section_of, wanted
from tranship.config.nearest import hint
from tranship.config.schema import Config, Section
from tranship.types import UserError

_SHOWN_CHARS = 60


def load(recipe: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration of a YAML recipe, with overrides such as "train.steps=5" (YAML values) put over it.

    Raises UserError, one line, for a file that is not there or not YAML, an unknown key (naming the nearest of ours,
    also across the names of other systems), a wrong value, or values that do not fit each other.
    """
    path = Path(recipe).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"there is no recipe {path}: give the path of a YAML file") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"the recipe {path} cannot be read: {reason}") from error
    return loads(yaml_text.read(text, str(path)), overrides, name=str(path))


def loads(recipe: Mapping[str, Any], overrides: Sequence[str] = (), *, name: str = "recipe") -> Config:
    """The configuration of a mapping, as `load`. name: what the mapping is, for errors."""
    if not isinstance(recipe, Mapping):
        what = "is empty" if recipe is None else f"holds {_shown(recipe)}"
        raise UserError(f"{name} {what}: wanted sections such as model, data and train")
    values = _copy(recipe)
    origins = {}
    for override in overrides:
        origins[_put(values, override)] = override
    values = _lists_to_tuples(values, Config)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise UserError(_message(error, values, name, origins)) from error


def dump(config: Config) -> str:
    """The whole configuration as YAML, defaults included; `load` of it gives an equal configuration."""
    return yaml_text.write(config.model_dump())


def _copy(value: Any) -> Any:
    return {key: _copy(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value


def _put(values: dict[str, Any], override: str) -> str:
    """Write one override into nested dictionaries; returns its dotted key."""
    path, equals, text = override.partition("=")
    path = path.strip()
    if not equals or not path or not all(path.split(".")):
        raise UserError(f"override {override!r}: write it as section.key=value, for example train.steps=5")
    value = yaml_text.read(text, f"override {override!r}")
    *sections, last = path.split(".")
    at = values
    for depth, section in enumerate(sections, 1):
        inner = at.get(section)
        if inner is None:
            inner = at[section] = {}
        if not isinstance(inner, dict):
            head = ".".join(sections[:depth])
            raise UserError(f"override {override!r}: {head} is {_shown(inner)}, not a section that holds keys")
        at = inner
    at[last] = value
    return path


def _lists_to_tuples(value: Any, section: type[Section]) -> Any:
    """A copy with tuples where fields hold tuples: YAML has only lists, and strict validation converts nothing."""
    if not isinstance(value, Mapping):
        return value
    copy = dict(value)
    for key, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            if key in copy:
                copy[key] = _lists_to_tuples(copy[key], inner)
        elif is_tuple(field.annotation) and isinstance(copy.get(key), list):
            items = items_section(field.annotation)
            copy[key] = tuple(_lists_to_tuples(item, items) if items else item for item in copy[key])
    return copy


def _message(error: ValidationError, values: Mapping[str, Any], name: str, origins: Mapping[str, str]) -> str:
    """One line for the first thing that is wrong, and the keys of the others. Unknown keys come first: a missing key
    is often one of them, misspelt."""
    found = list(_problems(error, values))
    found.sort(key=lambda problem: "unknown key" not in problem[1])
    path, text = found[0]
    override = next((origins[key] for key in origins if key == path or key.startswith(f"{path}.")), None)
    place = f"override {override!r}" if override else name
    more = list(dict.fromkeys(other for other, _ in found[1:] if other and other != path))
    rest = f" (also wrong: {', '.join(more)})" if more else ""
    return " ".join(f"{place}: {text}{rest}".splitlines())


def _problems(error: ValidationError, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each thing that is wrong: (dotted key, sentence)."""
    for item in error.errors(include_url=False):
        path = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            for leaf, inner in _leaves(path, item["input"]):
                yield leaf, f"unknown key {leaf} ({_shown(inner)}): {hint(leaf)}"
        elif item["type"] == "missing" and path in KEYS:
            yield path, f"{path} is missing: it wants {wanted(path)}{_about(path)}"
        elif item["type"] == "value_error":
            yield path, item["msg"].removeprefix("Value error, ")
        else:
            key = _known(path)
            yield key, f"{key} is {_shown(_at(values, key))}: it wants {wanted(key)}{_about(key)}"


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}", inner)
    else:
        yield path, value


def _known(path: str) -> str:
    """The key of ours that an error's place lies in: train.optimizer.betas for train.optimizer.betas.0."""
    if owner(path):
        return str(owner(path))
    while path not in KEYS:
        path = path.rpartition(".")[0]
    return path


def _at(values: Mapping[str, Any], key: str) -> Any:
    for part in key.split("."):
        values = values[part]
    return values


def _about(key: str) -> str:
    description = KEYS[key].description
    return f" ({description.rstrip('.')})" if description else ""


def _shown(value: Any) -> str:
    text = json.dumps(value, default=repr, ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
