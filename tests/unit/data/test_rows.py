"""Which schema a row follows, and what becomes of each of its columns."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tranship.config.schema import MixturePartConfig
from tranship.data.rows import to_row
from tranship.data.sources import load_rows
from tranship.types import UserError

USER = {"role": "user", "content": "Hi"}
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize("prompt", ["1 + 1 =", [USER]])
@pytest.mark.parametrize("truth", ["solution", "answer", "ground_truth"])
def test_further_columns_of_trl_rows_are_extra_info(prompt: Any, truth: str):
    row = to_row({"prompt": prompt, truth: "2", "level": 3, "tags": ["a"]}, "here", "mine")
    assert (row.prompt, row.ground_truth, row.data_source, row.schema) == (prompt, "2", "mine", "TRL")
    assert row.extra_info == {"level": 3, "tags": ["a"]}
    assert to_row({"prompt": prompt}, "here", "mine").ground_truth is None


def test_columns_without_a_json_form_are_left_out_and_named():
    row = to_row({"prompt": "a", "blob": b"x", "level": 3}, "here", "mine")
    assert (row.extra_info, row.left_out) == ({"level": 3}, ("blob",))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"prompt": "a", "solution": "1", "answer": "2"}, "columns solution and answer: which is the ground truth"),
        ({"prompt": "a", "answer": float("nan")}, "column answer is NaN"),
        (
            {"prompt": "a", "data_source": "s", "reward_model": {"ground_truth": float("nan")}},
            "column reward_model.ground_truth is NaN",
        ),
        ({"prompt": "a", "messages": [USER]}, "columns messages and prompt"),
        ({"prompt": "a", "completion": "b", "chosen": "c", "rejected": "d"}, "keep messages, completion, or chosen"),
        ({"completion": "b"}, "column 'prompt' is missing"),
        ({"question": "a"}, r"column 'prompt' is missing or empty \(columns: question\).*verl's.*or TRL's"),
        ({"prompt": "a", "data_source": "x"}, "column 'reward_model' is missing"),
        ({"prompt": "a", "reward_model": {"ground_truth": "1"}}, "column 'data_source' is missing"),
        ({"prompt": "a", "chat_template_kwargs": {"x": 1}}, "'chat_template_kwargs' is not read: use data.template"),
        ({"prompt": "a", "images": ["x"]}, "'images' is not read: only text"),
        ({"prompt": [USER], "tools": "[{]"}, "column tools: broken JSON"),
        ({"prompt": [USER], "tools": {"name": "x"}}, "column tools is dict"),
        ({"prompt": [USER], "tools": [3]}, "a tool is a JSON schema, not int 3"),
        ({"prompt": [USER, {"role": "assistant", "tool_calls": "x"}]}, "tool_calls is str"),
        ({"prompt": [USER, {"role": "assistant", "tool_calls": [{"id": 1}]}]}, "a tool call has a name"),
        (
            {"prompt": [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}]},
            "the arguments of a call of f are list",
        ),
    ],
)
def test_ambiguous_and_wrong_rows_are_refused(raw: dict[str, Any], message: str):
    with pytest.raises(UserError, match=f"here: .*{message}"):
        to_row(raw, "here", "mine")


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]])
def test_tools_are_schemas_or_json_text(tools: Any):
    assert to_row({"prompt": [USER], "tools": tools}, "here").tools == (TOOL,)
    assert to_row({"prompt": [USER], "tools": None}, "here").tools == ()


def test_calls_have_their_arguments_as_an_object():
    text = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    row = to_row({"prompt": [USER, {"role": "assistant", "content": None, "tool_calls": [text]}]}, "here")
    assert row.prompt[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_nulls_that_a_table_adds_to_messages_and_tools_are_no_keys(tmp_path: Path):
    other = {"type": "function", "function": {"name": "neg", "arguments": {"b": 2}}}
    raw = {
        "prompt": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL, other]}],
        "tools": [TOOL, {"type": "function", "function": {"name": "neg", "description": "d"}}],
        "level": {"x": None, "y": 1},
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([raw]), tmp_path / "a.parquet")
    row = load_rows(MixturePartConfig(source=str(tmp_path / "a.parquet")))[0]
    assert row.prompt == raw["prompt"]
    assert row.tools[1] == raw["tools"][1]
    assert row.extra_info == {"level": {"x": None, "y": 1}}
    assert row.data_source == "a"


def test_a_source_keeps_to_one_schema(tmp_path: Path):
    verl = {"prompt": "a", "data_source": "s", "reward_model": {"ground_truth": "1"}}
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, [verl, verl, {"prompt": "b", "answer": "1"}])))
    with pytest.raises(UserError, match=r"line 3: the row follows TRL's schema, and .*line 1 follows verl's"):
        load_rows(MixturePartConfig(source=str(path)))
