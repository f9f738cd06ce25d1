"""What a run leaves for people: profiles of chosen steps, snapshots of accidents, the list of what was dropped."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flow_helpers import read_jsonl

from tranship.config.load import loads
from tranship.trainer import run
from tranship.types import UserError

Recipe = Callable[..., dict[str, Any]]


def test_chosen_steps_are_profiled(recipe: Recipe, tmp_path: Path) -> None:
    run(loads(recipe(observe__profile_steps=[2])))
    files = sorted(path.name for path in (tmp_path / "run" / "profile").iterdir())
    assert files == ["step-2-fused.json.gz", "step-2-fused.txt"]
    trace = json.loads(gzip.decompress((tmp_path / "run" / "profile" / "step-2-fused.json.gz").read_bytes()))
    names = {event.get("name", "") for event in trace["traceEvents"]}
    assert any("Optimizer.step" in name for name in names), "the update lies within the step"


def test_a_kl_that_jumps_leaves_a_snapshot(recipe: Recipe, tmp_path: Path) -> None:
    changes = {
        "algorithm__kl": {"coef": 0.1, "where": "reward"},
        "train__optimizer": {"learning_rate": 0.05},
        "observe__snapshot_kl": 1e-3,
    }
    run(loads(recipe(train__steps=3, **changes)))
    folders = sorted((tmp_path / "run" / "snapshots").iterdir())
    assert folders
    rows = read_jsonl(folders[0] / "samples.jsonl")
    assert {"input", "output", "score", "logprobs", "ref_logprobs", "token_ids"} <= rows[0].keys()
    assert len(rows[0]["logprobs"]) == len(rows[0]["token_ids"]) == rows[0]["num_tokens"]
    assert "token_ids" not in read_jsonl(tmp_path / "run" / "samples.jsonl")[0]


def test_what_was_dropped_is_listed(recipe: Recipe, tmp_path: Path) -> None:
    rows = [{"prompt": "2 " * length, "solution": "2"} for length in (4, 200, 5, 300, 6, 7)]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(
        loads(
            recipe(
                data={"train": {"source": str(source)}, "max_prompt_tokens": 64, "too_long": "drop"},
                train__steps=1,
            )
        )
    )
    dropped = read_jsonl(tmp_path / "run" / "dropped.jsonl")
    assert [(row["set"], row["row"]) for row in dropped] == [("train", 1), ("train", 3)]
    step = next(row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "step")
    assert step["data/dropped"] == 2
    assert step["data/prompts"] == 4


def test_resuming_on_other_data_is_refused(recipe: Recipe) -> None:
    run(loads(recipe(train__steps=1)))
    other = {"source": "sums", "args": {"low": 1, "high": 9, "split": "train", "num_val": 4}}
    values = recipe(train__steps=2, run__resume="auto")
    values["data"]["train"] = {**other, "limit": 20}
    with pytest.raises(UserError, match=r"data\.train\.limit was None and is 20"):
        run(loads(values))


def test_resuming_on_a_file_that_changed_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"

    def write(answer: str) -> None:
        source.write_text("".join(json.dumps({"prompt": f"{n}", "solution": answer}) + "\n" for n in range(4)))

    data = {"train": {"source": str(source)}}
    write("1")
    run(loads(recipe(data=data, train__steps=1)))
    write("2")
    with pytest.raises(UserError, match=r"other training prompts than data\.train gives now"):
        run(loads(recipe(data=data, train__steps=2, run__resume="auto")))
    write("1")
    assert run(loads(recipe(data=data, train__steps=2, run__resume="auto"))).summary["steps"] == 2


def test_a_save_that_was_cut_off_is_passed_over(recipe: Recipe, tmp_path: Path) -> None:
    run(loads(recipe(train__steps=1)))
    torn = tmp_path / "run" / "checkpoints" / ".step-000002.part" / "trainer"
    torn.mkdir(parents=True)
    (torn / "weights.safetensors").write_bytes(b"half of it")
    assert run(loads(recipe(train__steps=2, run__resume="auto"))).summary["steps"] == 2
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "latest",
        "step-000001",
        "step-000002",
    ]


def test_a_truncated_file_is_refused_by_name(recipe: Recipe, tmp_path: Path) -> None:
    run(loads(recipe(train__steps=1)))
    weights = next((tmp_path / "run" / "checkpoints" / "step-000001" / "trainer").glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match=rf"is damaged \(trainer/{weights.name} has \d+ bytes and should have \d+\)"):
        run(loads(recipe(train__steps=2, run__resume="auto")))
