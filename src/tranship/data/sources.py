"""Names of prompt sources to rows: the built-in ones, files, and functions of users."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tranship.config.schema import DataSourceConfig
from tranship.data.files import SUFFIXES, read_file
from tranship.data.rows import Row, to_row
from tranship.lookup import resolve
from tranship.types import UserError

# name -> function(**args) that returns rows in verl's schema.
PROMPT_SOURCES: Mapping[str, str] = {"sums": "tranship.data.sums:sums"}


def load_rows(source: DataSourceConfig) -> list[Row]:
    """The checked rows of a source, at most `limit` of them. Raises UserError, also where there are none."""
    rows = [to_row(raw, where) for where, raw in itertools.islice(_raw_rows(source), source.limit)]
    if not rows:
        raise UserError(f"data source {source.source}: it has no rows: give at least one prompt")
    return rows


def _raw_rows(source: DataSourceConfig) -> Iterator[tuple[str, Any]]:
    suffix = Path(source.source).suffix.lower()
    if suffix in SUFFIXES:
        if source.args:
            raise UserError(f"data source {source.source}: a file takes no args, but got {sorted(source.args)}")
        return read_file(source.source)
    if suffix in (".json", ".csv", ".txt", ".arrow"):
        raise UserError(f"data source {source.source}: {suffix} files are not read: use .jsonl or .parquet")
    return _call(source)


def _call(source: DataSourceConfig) -> Iterator[tuple[str, Any]]:
    name = source.source
    function = resolve(name, PROMPT_SOURCES, "data source")
    if not callable(function):
        raise UserError(f"data source {name}: it is a {type(function).__name__}, not a function")
    try:
        inspect.signature(function).bind(**source.args)
    except TypeError as error:
        expected = ", ".join(inspect.signature(function).parameters) or "none"
        raise UserError(f"data source {name}: args do not fit ({error}); it takes: {expected}") from error
    try:
        raw_rows = function(**source.args)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"data source {name}: it failed: {type(error).__name__}: {error}") from error
    if not isinstance(raw_rows, Iterable) or isinstance(raw_rows, str | bytes | Mapping):
        raise UserError(f"data source {name}: it returned {type(raw_rows).__name__}, not rows in verl's schema")
    return ((f"{name} row {number}", raw) for number, raw in enumerate(raw_rows))
