"""Names of prompt sources to rows: the built-in ones, files, data sets of the hub, and functions of users."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tranship.config.schema import MixturePartConfig
from tranship.data.files import SUFFIXES, read_file
from tranship.data.rows import Row, to_row
from tranship.lookup import resolve
from tranship.types import UserError

# name -> function(**args) that returns rows in verl's schema, or TRL's.
PROMPT_SOURCES: Mapping[str, str] = {"sums": "tranship.data.sums:sums"}
# prefix -> function(what follows the colon, **args) that returns (place, raw row) of each row.
SOURCE_FAMILIES: Mapping[str, str] = {
    "hub": "tranship.data.hub:read_hub",
    "reasoning_gym": "tranship.data.puzzles:puzzles",
}


def load_rows(part: MixturePartConfig) -> list[Row]:
    """The checked rows of a source, at most `limit` of them. Raises UserError, also where there are none, and where
    a row follows another schema than the first."""
    name = _short_name(part.source)
    rows = [to_row(raw, where, name) for where, raw in itertools.islice(_raw_rows(part), part.limit)]
    if not rows:
        raise UserError(f"data source {part.source}: it has no rows: give at least one prompt")
    for row in rows:
        if row.schema != rows[0].schema:
            raise UserError(
                f"{row.where}: the row follows {row.schema}'s schema, and {rows[0].where} follows {rows[0].schema}'s: "
                "keep to one (verl's has the columns data_source and reward_model in each row)"
            )
    return rows


def _short_name(source: str) -> str:
    """What a source is called in metrics: a file's stem, a data set, a function."""
    if Path(source).suffix.lower() in SUFFIXES:
        return Path(source).stem
    prefix, _, rest = source.rpartition(":")
    return Path(rest).name if prefix == "hub" and Path(rest).is_absolute() else rest


def _raw_rows(part: MixturePartConfig) -> Iterator[tuple[str, Any]]:
    prefix, colon, rest = part.source.partition(":")
    if colon and prefix in SOURCE_FAMILIES:
        family = resolve(prefix, SOURCE_FAMILIES, "data source")
        return iter(_call(part, family, rest))
    suffix = Path(part.source).suffix.lower()
    if suffix in SUFFIXES:
        if part.args:
            raise UserError(f"data source {part.source}: a file takes no args, but got {sorted(part.args)}")
        return read_file(part.source)
    if suffix in (".json", ".csv", ".txt", ".arrow"):
        raise UserError(f"data source {part.source}: {suffix} files are not read: use .jsonl or .parquet")
    function = resolve(part.source, PROMPT_SOURCES, "data source")
    rows = _call(part, function)
    return ((f"{part.source} row {number}", raw) for number, raw in enumerate(rows))


def _call(part: MixturePartConfig, function: Callable[..., Any], *first: Any) -> Iterable[Any]:
    name = part.source
    if not callable(function):
        raise UserError(f"data source {name}: it is a {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind(*first, **part.args)
    except TypeError as error:
        expected = ", ".join(list(inspect.signature(function).parameters)[len(first) :]) or "none"
        raise UserError(f"data source {name}: args do not fit ({error}); it takes: {expected}") from error
    try:
        rows = function(*first, **part.args)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"data source {name}: it failed: {type(error).__name__}: {error}") from error
    if not isinstance(rows, Iterable) or isinstance(rows, str | bytes | Mapping):
        raise UserError(f"data source {name}: it returned {type(rows).__name__}, not rows in verl's schema or TRL's")
    return rows
