"""Prompt files, read row by row: JSONL and parquet. Errors name the file and the line or row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from tranship.data.messages import without_nulls
from tranship.types import UserError

SUFFIXES = (".jsonl", ".parquet")


def read_file(path: str) -> Iterator[tuple[str, Any]]:
    """(place, raw row) of each row of a .jsonl or .parquet file, in order. Raises UserError where it cannot be read."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"data source: there is no file {file}: give its path from here, or an absolute one")
    if file.suffix.lower() == ".jsonl":
        return _read_jsonl(file)
    assert file.suffix.lower() == ".parquet", file
    return _read_parquet(file)


def _read_jsonl(file: Path) -> Iterator[tuple[str, Any]]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file} line {number}"
            try:
                text = line.decode("utf-8-sig")
                if not text.strip():
                    continue
                row = json.loads(text)
            except UnicodeDecodeError as error:
                raise UserError(f"{where}: not UTF-8 text ({error.reason}): save the file as UTF-8") from error
            except json.JSONDecodeError as error:
                raise UserError(
                    f"{where}: broken JSON ({error.msg}, column {error.colno}): each line is one whole JSON object"
                ) from error
            yield where, row


def _read_parquet(file: Path) -> Iterator[tuple[str, Any]]:
    try:
        with pyarrow.parquet.ParquetFile(file) as table:
            number = 0
            for batch in table.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield f"{file} row {number}", without_nulls(row)
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{file}: not a whole parquet file ({first_line}): write it again") from error
