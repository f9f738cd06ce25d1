"""`tranship eval` of what a run left and of a plain folder: real sampling, and the same figures as the run's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flow_helpers import read_jsonl

import tranship
from tranship.cli import main
from tranship.config.load import dump, loads
from tranship.trainer.evaluate import evaluate, prepare
from tranship.types import RunError

Recipe = Callable[..., dict[str, Any]]


def call(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert isinstance(caught.value.code, int)
    return caught.value.code


def written(values: dict[str, Any], path: Path) -> str:
    path.write_text(dump(loads(values)))
    return str(path)


def test_a_runs_model_scores_as_the_run_did(recipe: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    result = tranship.run(loads(recipe(run__export=True, validation__after_training=True)))
    run_dir = result.run_dir
    (checkpoint,) = (run_dir / "checkpoints").glob("step-*")
    after = [row for row in read_jsonl(run_dir / "val_samples.jsonl") if row["greedy"]]
    capsys.readouterr()
    for model in (run_dir, checkpoint):
        assert call("eval", str(model), "--out", str(run_dir / "e" / f"{model.name}.json")) == 0
        facts = json.loads((run_dir / "e" / f"{model.name}.json").read_text())
        assert facts["score_greedy"] == result.summary["val_greedy_after"]
        samples = [row for row in read_jsonl(Path(facts["samples_file"])) if row["greedy"]]
        assert [(row["input"], row["output"], row["score"]) for row in samples] == [
            (row["input"], row["output"], row["score"]) for row in after
        ]
        printed = capsys.readouterr().out
        assert "greedy mean@1" in printed
        assert f"{facts['score_greedy']:.4f}" in printed


def test_a_folder_with_a_recipe(
    recipe: Recipe, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures.json"
    path = written(recipe(), tmp_path / "recipe.yaml")
    code = call(
        *("eval", str(tiny_model), "data.val.limit=3", "--recipe", path),
        *("--samples", "4", "--out", str(out), "--json"),
    )
    assert code == 0
    facts = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out) == facts
    assert facts["num_prompts"] == 3
    assert facts["samples_per_prompt"] == 4
    assert list(facts["sources"]) == ["sums"]
    assert {"mean@4", "pass@1", "pass@2", "pass@4", "best@2", "best@4"} <= facts["sampled"].keys()
    assert facts["sampled"]["mean@4"]["num_prompts"] == 3
    assert facts["sampled"]["best@2"]["value"] <= facts["sampled"]["best@4"]["value"]
    assert facts["sampled"]["mean@4"]["value"] == facts["score"]
    assert facts["model"]["path"] == str(tiny_model.resolve())
    assert len(facts["model"]["digest"]) == 32
    assert facts["versions"]["tranship"]
    assert facts["notes"], "this reward names no answers, and the file says that there is no maj@k"
    samples = read_jsonl(Path(facts["samples_file"]))
    assert len(samples) == 3 * 4 + 3
    sampled = [row["score"] for row in samples if not row["greedy"]]
    assert sum(sampled) / len(sampled) == pytest.approx(facts["score"])
    assert not (tmp_path / "run").exists(), "an evaluation does not touch the recipe's run folder"


def test_the_best_model_of_a_run_is_the_one_that_its_best_validation_saw(recipe: Recipe, tmp_path: Path) -> None:
    changes = {"checkpoint__best_metric": "score_greedy", "validation__every_steps": 1, "train__steps": 4}
    result = tranship.run(loads(recipe(train__optimizer={"learning_rate": 1e-2}, **changes)))
    rows = [row for row in read_jsonl(result.run_dir / "metrics.jsonl") if row["kind"] == "during"]
    best = max(rows, key=lambda row: row["val/score_greedy"])
    note = json.loads((result.run_dir / "best" / "best.json").read_text())
    assert (note["step"], note["value"]) == (best["step"], best["val/score_greedy"])
    evaluated = evaluate(prepare(str(result.run_dir / "best"), None, out=tmp_path / "best.json"))
    assert evaluated is not None
    assert evaluated.record.score_greedy == best["val/score_greedy"]


@pytest.mark.slow
def test_processes_of_their_own_sample_the_same(recipe: Recipe, tiny_model: Path, tmp_path: Path) -> None:
    found = {}
    for name, placement in (
        ("inline", {}),
        ("split", {"placement__runtime": "ray", "placement__layout": "split"}),
    ):
        path = Path(written(recipe(**placement), tmp_path / f"{name}.yaml"))
        evaluated = evaluate(prepare(str(tiny_model), path, samples=2, out=tmp_path / f"{name}.json"))
        assert evaluated is not None
        found[name] = [(row["output"], row["score"]) for row in read_jsonl(evaluated.prepared.samples_file)]
    assert found["inline"] == found["split"]


def test_a_reward_that_scores_nothing_is_no_score_of_zero(recipe: Recipe, tiny_model: Path, tmp_path: Path) -> None:
    reward = tmp_path / "broken.py"
    reward.write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n    raise OSError('gone')\n"
    )
    path = Path(written(recipe(reward__function=f"{reward}:score"), tmp_path / "recipe.yaml"))
    prepared = prepare(str(tiny_model), path, out=tmp_path / "figures.json")
    with pytest.raises(RunError, match=r"no sample could be scored.*gone"):
        evaluate(prepared)
    assert not prepared.out.exists()
    assert {row["status"] for row in read_jsonl(prepared.samples_file)} == {"invalid"}
