"""Sets of prompts: mixtures, what was left out, what is double, and a digest that another row changes."""

import json
from pathlib import Path
from typing import Any

import pytest

from tranship.config.schema import DataConfig, DataSourceConfig, MixturePartConfig
from tranship.data.prompts import load_prompts
from tranship.data.promptset import PromptSet, shared_prompts, write_dropped
from tranship.data.stream import make_stream
from tranship.models.tiny import make_tokenizer
from tranship.types import UserError

TOKENIZER = make_tokenizer(600)


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(source: DataSourceConfig, **settings: Any) -> PromptSet:
    return load_prompts(source, TOKENIZER, data=DataConfig(train=source, **settings))


@pytest.fixture
def mixture(tmp_path: Path) -> DataSourceConfig:
    easy = write(tmp_path / "easy.jsonl", [{"prompt": f"e{i}", "answer": str(i)} for i in range(3)])
    hard = write(tmp_path / "hard.jsonl", [{"prompt": "h0"}, {"prompt": "h" * 30}, {"prompt": "h2"}, {"prompt": "h0"}])
    parts = (MixturePartConfig(source=easy, weight=3.0), MixturePartConfig(source=hard, name="other"))
    return DataSourceConfig(mixture=parts)


def test_parts_of_a_mixture_follow_each_other(mixture: DataSourceConfig):
    found = load(mixture, max_prompt_tokens=20, too_long="drop")
    assert [prompt.index for prompt in found.prompts] == [0, 1, 2, 3, 5, 6]
    assert [prompt.data_source for prompt in found.prompts] == ["easy"] * 3 + ["other"] * 3
    assert [(part.start, part.stop, part.num_rows, part.weight) for part in found.parts] == [
        (0, 3, 3, 3.0),
        (3, 6, 4, 1.0),
    ]
    assert found.numbers == {"rows": 7, "prompts": 6, "dropped": 1, "duplicates": 1}
    taken = [prompt.data_source for _, prompt in make_stream(found, DataConfig(train=mixture), seed=0).take(8)]
    assert taken.count("easy") == 6


def test_what_was_left_out_is_said_and_written(mixture: DataSourceConfig, tmp_path: Path):
    found = load(mixture, max_prompt_tokens=20, too_long="drop")
    text = "\n".join(found.report())
    assert "easy.jsonl: 3 rows, 3 prompts, 75.0% of the stream" in text
    assert "hard.jsonl: 4 rows, 3 prompts, 25.0% of the stream" in text
    assert "dropped 1 rows: prompt too long (" in text
    assert "hard.jsonl line 2: prompt too long: 30 prompt tokens, over 20)" in text
    assert "hard.jsonl: 1 of 3 prompts have the tokens of an earlier one" in text
    write_dropped(tmp_path / "dropped.jsonl", {"train": found, "val": PromptSet([], [])})
    (line,) = (tmp_path / "dropped.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "set": "train",
        "row": 4,
        "where": f"{tmp_path}/hard.jsonl line 2",
        "reason": "prompt too long: 30 prompt tokens, over 20",
    }


def test_a_part_of_which_nothing_is_left_is_refused(mixture: DataSourceConfig):
    with pytest.raises(UserError, match=r"easy\.jsonl: 3 of 3 prompts exceed 1 tokens"):
        load(mixture, max_prompt_tokens=1, too_long="drop")


BASE = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]


@pytest.mark.parametrize(
    "rows",
    [
        BASE[:1],
        BASE[::-1],
        [BASE[0], {"prompt": "c", "answer": "2"}],
        [BASE[0], {"prompt": "b", "answer": "3"}],
        [BASE[0], {"prompt": "b", "answer": 2}],
    ],
)
def test_another_digest_for_other_rows(tmp_path: Path, rows: list[Any]):
    same = load(DataSourceConfig(source=write(tmp_path / "a.jsonl", BASE))).digest
    assert same == load(DataSourceConfig(source=write(tmp_path / "a.jsonl", BASE))).digest
    assert len(same) == 32
    assert load(DataSourceConfig(source=write(tmp_path / "a.jsonl", rows))).digest != same


def test_recorded_responses_and_weights_change_the_digest(tmp_path: Path):
    def digest(completion: str) -> str:
        path = write(tmp_path / "a.jsonl", [{"prompt": "a", "completion": completion}])
        source = DataSourceConfig(source=path)
        return load_prompts(source, TOKENIZER, data=DataConfig(train=source), recorded="demonstration").digest

    assert digest("x") == digest("x") != digest("y")
    path = write(tmp_path / "b.jsonl", BASE)
    part = MixturePartConfig(source=path)
    first, second = (
        load(DataSourceConfig(mixture=(MixturePartConfig(source=path, weight=weight), part))) for weight in (1.0, 2.0)
    )
    assert first.digest != second.digest


def test_held_out_prompts_that_training_has_too_are_found():
    train = load(DataSourceConfig(source="sums", args={"high": 6, "num_val": 5}))
    val = load(DataSourceConfig(source="sums", args={"high": 6, "num_val": 5, "split": "val"}))
    assert shared_prompts(train, val) == []
    assert len(shared_prompts(train, train)) == len(train.prompts)
