"""Data sets by the library `datasets`, from local folders alone."""

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from tranship.config.schema import MixturePartConfig
from tranship.data.rows import Row
from tranship.data.sources import load_rows
from tranship.types import UserError

ROWS = [{"prompt": f"p{i}", "answer": str(i), "level": i} for i in range(4)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def rows(path: Path | str, limit: int | None = None, **args: Any) -> list[Row]:
    return load_rows(MixturePartConfig(source=f"hub:{path}", args=args, limit=limit))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "puzzles"
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "train.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[:1]), folder / "test.parquet")
    return folder


def test_a_folder_of_files(folder: Path):
    found = rows(folder)
    assert [(row.prompt, row.ground_truth, row.extra_info) for row in found] == [
        (f"p{i}", str(i), {"level": i}) for i in range(4)
    ]
    assert found[0].data_source == "puzzles"
    assert found[2].where == f"hub:{folder} train row 2"
    assert len(rows(folder, split="test")) == 1
    assert [row.prompt for row in rows(folder, split="train[1:3]")] == ["p1", "p2"]
    assert len(rows(folder, limit=3)) == 3
    assert len(rows(folder, data_files="test.parquet")) == 1


def test_messages_lose_the_nulls_that_a_table_adds(tmp_path: Path):
    messages = [{"role": "user", "content": "a", "name": "n"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    (row,) = rows(tmp_path / "data")
    assert (row.prompt, row.responses) == (messages[:1], (messages[1:],))


def test_pictures_and_dates_are_left_out(tmp_path: Path):
    (tmp_path / "data").mkdir()
    table = pyarrow.table(
        {"prompt": ["a"], "picture": [{"bytes": b"x", "path": None}], "day": [datetime.date(2025, 7, 17)]}
    )
    features = datasets.Features(
        prompt=datasets.Value("string"), picture=datasets.Image(), day=datasets.Value("date32")
    )
    datasets.Dataset(table.cast(features.arrow_schema)).save_to_disk(tmp_path / "saved")
    (row,) = rows(tmp_path / "saved")
    assert (row.prompt, row.extra_info, row.left_out) == ("a", {}, ("picture", "day"))


def test_a_folder_that_was_saved(tmp_path: Path):
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": table, "val": table.select(range(2))}).save_to_disk(tmp_path / "two")
    assert len(rows(tmp_path / "one")) == 4
    assert len(rows(tmp_path / "two", split="val")) == 2
    with pytest.raises(UserError, match="takes no config"):
        rows(tmp_path / "one", config="main")


def test_what_does_not_load_is_said_in_one_line(folder: Path, tmp_path: Path):
    for args, message in [
        ({"split": "nowhere"}, "it does not load .*check the name, the args split"),
        ({"streaming": True}, "args do not fit .*it takes: split, config, revision, data_files"),
    ]:
        with pytest.raises(UserError, match=message) as caught:
            rows(folder, **args)
        assert "\n" not in str(caught.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="it does not load"):
        rows(tmp_path / "empty")


def test_a_missing_package_is_named_with_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"package datasets: pip install 'tranship\[data\]'"):
        rows(folder)
