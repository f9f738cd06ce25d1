"""Reading prompts: verl's schema from JSONL and parquet, and errors that name file, line and column."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tranship.config.schema import DataConfig, DataSourceConfig
from tranship.data.prompts import PromptSet, load_prompts
from tranship.models.tiny import make_tokenizer
from tranship.types import UserError

TOKENIZER = make_tokenizer(600)


def row(**changes: Any) -> dict[str, Any]:
    base = {
        "data_source": "gsm",
        "prompt": [{"role": "user", "content": "What is 1 + 2?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"split": "train", "index": 2**53 + 1, "tags": ["a", "b"], "none": None},
    }
    return {key: value for key, value in (base | changes).items() if value != "absent"}


def load(path: Path | str, limit: int | None = None, **settings: Any) -> PromptSet:
    source = DataSourceConfig(source=str(path), limit=limit)
    return load_prompts(source, TOKENIZER, data=DataConfig(train=source, **settings))


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((entry if isinstance(entry, str) else json.dumps(entry)) + "\n" for entry in rows))
    return path


def write_parquet(path: Path, rows: list[Any]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


WRITERS = {"rows.jsonl": write_jsonl, "rows.parquet": write_parquet}


@pytest.mark.parametrize("name", WRITERS)
def test_rows_come_back_in_json_values(tmp_path: Path, name: str):
    rows = [row(), row(prompt=[{"role": "system", "content": "s"}, {"role": "user", "content": "u", "name": "n"}])]
    found = load(WRITERS[name](tmp_path / name, rows))
    assert [prompt.index for prompt in found.prompts] == [0, 1]
    first = found.prompts[0]
    assert (first.data_source, first.ability, first.ground_truth) == ("gsm", "math", "3")
    assert first.extra_info == rows[0]["extra_info"]
    assert type(first.extra_info["index"]) is int
    assert first.token_ids.dtype == np.int32
    assert first.text == "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert found.dropped == []
    assert json.dumps(first.extra_info)


@pytest.mark.parametrize("name", WRITERS)
def test_plain_strings_are_prompts_too(tmp_path: Path, name: str):
    found = load(WRITERS[name](tmp_path / name, [row(prompt="1 + 1 ="), row(prompt="<|im_start|>x")]))
    assert found.prompts[0].text == "1 + 1 ="
    assert len(found.notes) == 1
    assert "1 plain prompts (first:" in found.notes[0]


@pytest.mark.parametrize("name", WRITERS)
def test_limit_reads_only_so_many_rows(tmp_path: Path, name: str):
    found = load(WRITERS[name](tmp_path / name, [row() for _ in range(5)]), limit=2)
    assert len(found.prompts) == 2


def test_structured_ground_truths_of_parquet_are_kept(tmp_path: Path):
    truth = {"cases": [{"in": "1", "out": "2"}], "score": 0.5}
    path = write_parquet(tmp_path / "a.parquet", [row(reward_model={"style": "rule", "ground_truth": truth})])
    assert load(path).prompts[0].ground_truth == truth


def test_values_without_a_json_form_are_named(tmp_path: Path):
    path = tmp_path / "a.parquet"
    write_parquet(path, [row(extra_info={"blob": b"x"})])
    with pytest.raises(UserError, match=r"a\.parquet row 0: column extra_info\.blob: a bytes is not a JSON value"):
        load(path)


def test_broken_json_names_the_line(tmp_path: Path):
    path = write_jsonl(tmp_path / "bad.jsonl", [row()] * 6 + ['{"prompt": '] + [row()])
    with pytest.raises(UserError, match=r"bad\.jsonl line 7: broken JSON") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_blank_lines_count_as_lines_and_a_byte_order_mark_is_no_error(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text("\ufeff" + json.dumps(row()) + "\n\n" + json.dumps(row(data_source="absent")) + "\n")
    with pytest.raises(UserError, match="line 3: column 'data_source' is missing"):
        load(path)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": "absent"}, "column 'prompt' is missing or empty .columns: data_source, ability"),
        ({"data_source": "absent"}, "column 'data_source'"),
        ({"reward_model": "absent"}, "column 'reward_model'"),
        ({"reward_model": {"style": "rule"}}, "reward_model has no ground_truth"),
        ({"data_source": 3}, "column data_source is int 3, not a string"),
        ({"prompt": [{"content": "x"}]}, "a message is an object with role and content"),
        ({"prompt": [{"role": "user"}]}, "content of the user message is NoneType"),
        ({"prompt": 5}, "column prompt is int 5"),
        ({"prompt": []}, "column prompt"),
        ({"prompt": ""}, "column prompt"),
        ({"extra_info": [1]}, "column extra_info is list"),
    ],
)
def test_a_bad_column_is_named_with_its_place(tmp_path: Path, name: str, changes: dict[str, Any], message: str):
    path = WRITERS[name](tmp_path / name, [row(**changes)])
    place = "line 1" if name.endswith("jsonl") else "row 0"
    with pytest.raises(UserError, match=rf"{name} {place}: .*{message}"):
        load(path)


def test_a_row_that_is_no_object(tmp_path: Path):
    with pytest.raises(UserError, match="line 1: the row is list"):
        load(write_jsonl(tmp_path / "a.jsonl", ["[1]"]))


def test_files_that_cannot_be_read(tmp_path: Path):
    for name, content, message in [
        ("empty.jsonl", b"", "it has no rows"),
        ("latin.jsonl", b'{"a": "\xe9"}\n', "line 1: not UTF-8"),
        ("bad.parquet", b"PAR1 nothing", "not a whole parquet file"),
        ("a.csv", b"a,b\n", r"\.csv files are not read: use \.jsonl or \.parquet"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=message):
            load(tmp_path / name)
    with pytest.raises(UserError, match="there is no file"):
        load(tmp_path / "absent.jsonl")
    with pytest.raises(UserError, match="it has no rows"):
        load(write_parquet(tmp_path / "empty.parquet", []))


def test_prompts_that_are_too_long_are_refused_with_their_rows(tmp_path: Path):
    rows = [row(), row(prompt="x" * 90), row(), *[row(prompt="y" * 70)] * 3]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(
        UserError, match=r"4 of 6 prompts exceed 60 tokens, first row 1 \(\d+ tokens\), row 3"
    ) as caught:
        load(path, max_prompt_tokens=60)
    assert "data.too_long=drop" in str(caught.value)
    found = load(path, max_prompt_tokens=60, too_long="drop")
    assert [prompt.index for prompt in found.prompts] == [0, 2]
    assert [entry.row for entry in found.dropped] == [1, 3, 4, 5]
    assert found.dropped[0].where == f"{path} line 2"
    assert "over 60" in found.dropped[0].reason


def test_dropping_every_prompt_is_an_error(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [row()])
    with pytest.raises(UserError, match=r"1 of 1 prompts exceed 2 tokens.*raise data.max_prompt_tokens"):
        load(path, max_prompt_tokens=2, too_long="drop")


def test_errors_of_encoding_name_the_row(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [row(), row(prompt="plain")])
    with pytest.raises(UserError, match=r"line 2: the prompt is a plain string, which data\.system_prompt"):
        load(path, system_prompt="Be brief.")


def test_a_template_that_writes_the_date_is_noted(tmp_path: Path):
    tokenizer = make_tokenizer(600)
    tokenizer.chat_template = (
        "{% if date_string is not defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
        "{{ date_string }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    )
    source = DataSourceConfig(source=str(write_jsonl(tmp_path / "a.jsonl", [row()])))
    open_date = load_prompts(source, tokenizer, data=DataConfig(train=source))
    assert any("writes today's date into each prompt" in note for note in open_date.notes)
    fixed = load_prompts(source, tokenizer, data=DataConfig(train=source, template_args={"date_string": "17 Jul 2025"}))
    assert fixed.prompts[0].text.startswith("17 Jul 2025")
    assert fixed.notes == ()


def test_functions_of_users_are_sources(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def rows(n):\n"
        "    for i in range(n):\n"
        "        yield {'data_source': 's', 'prompt': f'p{i}', 'reward_model': {'ground_truth': i}}\n"
        "def broken():\n    raise OSError('disk')\n"
        "def wrong():\n    return 5\n"
        "value = 3\n"
    )

    def from_function(name: str, **args: Any) -> PromptSet:
        source = DataSourceConfig(source=f"{file}:{name}", args=args)
        return load_prompts(source, TOKENIZER, data=DataConfig(train=source))

    assert [prompt.ground_truth for prompt in from_function("rows", n=3).prompts] == [0, 1, 2]
    for name, args, message in [
        ("rows", {"m": 3}, "args do not fit .*it takes: n"),
        ("rows", {"n": 0}, "it has no rows"),
        ("broken", {}, "it failed: OSError: disk"),
        ("wrong", {}, "it returned int"),
        ("value", {}, "it is a int, not a function"),
        ("absent", {}, "has no 'absent'"),
    ]:
        with pytest.raises(UserError, match=message):
            from_function(name, **args)


def test_files_take_no_args(tmp_path: Path):
    path = write_jsonl(tmp_path / "a.jsonl", [row()])
    source = DataSourceConfig(source=str(path), args={"n": 1})
    with pytest.raises(UserError, match="a file takes no args"):
        load_prompts(source, TOKENIZER, data=DataConfig(train=source))
