"""Files of one JSON object a line: append and flush, read back, cut off at a step. Survives a line that a kill tore."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tranship.types import UserError


class JsonlWriter:
    """Appends lines to `path`, each flushed to the operating system before the call returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one line. Raises ValueError for NaN and infinities, which JSON does not have."""
        self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; further writes raise ValueError."""
        self._file.close()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file, one at a time; none if it does not exist. A torn last line is left out.

    Raises UserError naming the line if another one is not JSON.
    """
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{path}: line {number} is not JSON ({error.msg}): repair or remove it") from error


def keep_rows(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Rewrite `path` with only the rows that are wanted, whole or not at all, and return the dropped ones."""
    if not path.exists():
        return []
    dropped = []
    temporary = path.with_name(path.name + ".part")
    with temporary.open("w", encoding="utf-8") as file:
        for row in read_jsonl(path):
            if wanted(row):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            else:
                dropped.append(row)
    os.replace(temporary, path)
    return dropped


def finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with None where a number, or one of a dictionary or list in it, is NaN or infinite: JSON has neither."""
    return {name: _finite_value(value) for name, value in row.items()}


def _finite_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return finite(value)
    if isinstance(value, list):
        return [_finite_value(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
