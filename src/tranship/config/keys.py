"""The keys of the configuration, walked once: their dotted paths, and in words what each wants."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from tranship.config.schema import Config, Section


def section_of(annotation: Any) -> type[Section] | None:
    """The section that an annotation stands for (`Section` or `Section | None`), or None."""
    candidates = get_args(annotation) if _is_union(annotation) else (annotation,)
    for candidate in candidates:
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def items_section(annotation: Any) -> type[Section] | None:
    """The section that each item of a list is (`tuple[Section, ...]`), or None."""
    return section_of(get_args(annotation)[0]) if get_origin(annotation) is tuple else None


def is_tuple(annotation: Any) -> bool:
    """Whether a field holds a tuple (a list in YAML), or one or nothing."""
    candidates = get_args(annotation) if _is_union(annotation) else (annotation,)
    return any(get_origin(candidate) is tuple for candidate in candidates)


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _walk(section: type[Section], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        path = f"{prefix}{name}"
        yield path, field
        inner = section_of(field.annotation)
        if inner is not None:
            yield from _walk(inner, f"{path}.")


KEYS: Mapping[str, FieldInfo] = dict(_walk(Config, ""))
LEAVES: tuple[str, ...] = tuple(path for path, field in KEYS.items() if section_of(field.annotation) is None)


def owner(path: str) -> str | None:
    """The free-form key that a path lies in (`reward.args` for reward.args.scale.low), or None."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        head = ".".join(parts[:end])
        if head in KEYS:
            return head if is_free(head) else None
    return None


def is_free(path: str) -> bool:
    """Whether a key holds a mapping whose keys are not ours."""
    return get_origin(KEYS[path].annotation) is dict


def is_nullable(path: str) -> bool:
    """Whether a key may be null."""
    return type(None) in get_args(KEYS[path].annotation)


def wanted(path: str) -> str:
    """What the key takes, in words: "an integer, at least 1, or null"."""
    field = KEYS[path]
    section = section_of(field.annotation)
    if section is not None:
        text = f"a section with the keys {', '.join(section.model_fields)}"
    else:
        text = _type_words(field.annotation)
    bounds = [words for limit in field.metadata for words in _bound_words(limit)]
    text = ", ".join([text, *bounds])
    return f"{text}, or null" if is_nullable(path) else text


def _type_words(annotation: Any) -> str:
    if _is_union(annotation):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    origin = get_origin(annotation)
    if origin is Literal:
        return f"one of {', '.join(map(str, get_args(annotation)))}"
    if origin is tuple:
        parts = get_args(annotation)
        items = items_section(annotation)
        if items is not None:
            return f"a list of sections with the keys {', '.join(items.model_fields)}"
        many = {int: "integers", float: "numbers", str: "strings"}[parts[0]]
        return f"a list of {many}" if parts[-1] is Ellipsis else f"a list of {len(parts)} {many}"
    if origin is dict:
        return "a mapping"
    return {int: "an integer", float: "a number", str: "a string", bool: "true or false"}[annotation]


def _bound_words(limit: Any) -> Iterator[str]:
    for kind, words in (
        (annotated_types.Ge, "at least {}"),
        (annotated_types.Gt, "above {}"),
        (annotated_types.Le, "at most {}"),
        (annotated_types.Lt, "below {}"),
    ):
        if isinstance(limit, kind):
            yield words.format(getattr(limit, kind.__name__.lower()))
