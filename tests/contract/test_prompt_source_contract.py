"""What holds for every built-in source of prompts, and for every family of sources."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tranship.config.schema import DataConfig, DataSourceConfig, MixturePartConfig
from tranship.data.orders import ORDERS
from tranship.data.prompts import load_prompts
from tranship.data.sources import PROMPT_SOURCES, SOURCE_FAMILIES, load_rows
from tranship.lookup import resolve
from tranship.models.tiny import make_tokenizer

FILE = "a .jsonl file"


@pytest.fixture(params=[*PROMPT_SOURCES, *SOURCE_FAMILIES, FILE])
def source(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    name = request.param
    file = tmp_path / "train.jsonl"
    rows = [{"prompt": [{"role": "user", "content": f"{i}?"}], "answer": str(i), "level": i} for i in range(5)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if name == FILE:
        return {"source": str(file)}
    if name == "hub":
        monkeypatch.setattr(sys.modules["datasets"].config, "HF_DATASETS_CACHE", tmp_path / "cache")
        return {"source": f"hub:{tmp_path}", "args": {"data_files": "train.jsonl"}}
    if name == "reasoning_gym":
        return {"source": "reasoning_gym:chain_sum", "args": {"size": 12}}
    return {"source": name}


def test_rows_follow_the_schema_and_are_the_same_each_time(source: dict[str, Any]):
    part = MixturePartConfig(**source)
    rows = load_rows(part)
    assert rows == load_rows(part)
    for row in rows:
        assert row.data_source
        assert row.where.startswith((f"{part.source} ", f"{part.source}:"))
        assert isinstance(row.prompt, str) or all({"role", "content"} <= set(message) for message in row.prompt)
        assert json.loads(json.dumps([row.ground_truth, row.extra_info])) == [row.ground_truth, row.extra_info]


def test_limit_keeps_the_first_rows(source: dict[str, Any]):
    assert load_rows(MixturePartConfig(**source, limit=3)) == load_rows(MixturePartConfig(**source))[:3]


def test_a_mixture_of_a_source_with_itself_has_its_rows_twice(source: dict[str, Any]):
    one, two = DataSourceConfig(**source), DataSourceConfig(mixture=(MixturePartConfig(**source),) * 2)
    tokenizer = make_tokenizer(600)
    first, second = (load_prompts(s, tokenizer, data=DataConfig(train=s)) for s in (one, two))
    assert [p.text for p in second.prompts] == [p.text for p in first.prompts] * 2
    assert first.digest == load_prompts(one, tokenizer, data=DataConfig(train=one)).digest != second.digest


def test_every_entry_of_the_tables_is_there():
    for table in (PROMPT_SOURCES, SOURCE_FAMILIES, ORDERS):
        assert all(callable(resolve(name, table, "data")) for name in table)
