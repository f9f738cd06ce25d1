"""What holds for every built-in source of prompts."""

import json

import pytest

from tranship.config.schema import DataSourceConfig
from tranship.data.sources import PROMPT_SOURCES, load_rows


@pytest.mark.parametrize("name", PROMPT_SOURCES)
def test_rows_follow_the_schema_and_are_the_same_each_time(name: str):
    source = DataSourceConfig(source=name)
    rows = load_rows(source)
    assert rows == load_rows(source)
    for row in rows:
        assert row.data_source
        assert row.where.startswith(f"{name} row ")
        assert isinstance(row.prompt, str) or all({"role", "content"} <= set(message) for message in row.prompt)
        json.dumps([row.ground_truth, row.extra_info])


@pytest.mark.parametrize("name", PROMPT_SOURCES)
def test_limit_keeps_the_first_rows(name: str):
    assert load_rows(DataSourceConfig(source=name, limit=3)) == load_rows(DataSourceConfig(source=name))[:3]
