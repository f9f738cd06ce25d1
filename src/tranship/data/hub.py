"""Data sets of the Hugging Face hub, and folders in a form that the library `datasets` loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tranship.data.messages import without_nulls
from tranship.types import UserError


def read_hub(
    path: str,
    split: str = "train",
    config: str | None = None,
    revision: str | None = None,
    data_files: str | Sequence[str] | Mapping[str, Any] | None = None,
) -> Iterator[tuple[str, Any]]:
    """(place, raw row) of each row of `hub:path`, in order.

    path: owner/name, or a folder: of data files, or one that `save_to_disk` wrote. split: also a slice of one
    ("train[:500]"). config: the configuration ("main"). revision: a branch, a tag, or (what a run that should be
    repeatable names) a commit. data_files: as for `datasets.load_dataset`. The whole split is downloaded before the
    first row comes. Raises UserError where it does not load, or the package is missing.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError("a data source hub:... needs the package datasets: pip install 'tranship[data]'") from error
    name = f"data source hub:{path}"
    try:
        if _was_saved(path):
            if config is not None or revision is not None or data_files is not None:
                raise UserError(f"{name}: a saved folder takes no config, revision or data_files: leave them out")
            table = datasets.load_from_disk(path)
            if isinstance(table, datasets.DatasetDict):
                table = table[split]
        else:
            table = datasets.load_dataset(path, config, split=split, revision=revision, data_files=data_files)
    except UserError:
        raise
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        raise UserError(
            f"{name}: it does not load ({type(error).__name__}: {first_line}): check the name, the args split and "
            "config, and the network"
        ) from error
    assert isinstance(table, datasets.Dataset), type(table)
    for column, feature in table.features.items():
        # Images and sounds stay files: to decode them would need further packages, and nothing reads them.
        if getattr(feature, "decode", False):
            table = table.cast_column(column, replace(feature, decode=False))
    return ((f"hub:{path} {split} row {number}", without_nulls(row)) for number, row in enumerate(_rows(name, table)))


def _was_saved(path: str) -> bool:
    return any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _rows(name: str, table: Any) -> Iterator[dict[str, Any]]:
    try:
        yield from table
    except Exception as error:
        first_line = (str(error).strip().splitlines() or [""])[0]
        raise UserError(f"{name}: its rows cannot be read ({type(error).__name__}: {first_line})") from error
