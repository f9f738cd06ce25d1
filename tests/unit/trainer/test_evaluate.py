"""What `tranship eval` takes for a model, what it refuses before anything starts, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tranship.config.load import loads
from tranship.models.catalog import get
from tranship.trainer.checkpoint import write_cut
from tranship.trainer.evaluate import evaluation_config, prepare
from tranship.trainer.trained import TrainedModel, find_model, weights_digest
from tranship.types import UserError
from tranship.worker.spec import WEIGHTS

RECIPE = """
model: {path: nowhere}
data:
  train: {source: sums, args: {low: 1, high: 9, split: train, num_val: 4}}
  val: {source: sums, args: {low: 1, high: 9, split: val, num_val: 4}}
rollout: {max_response_tokens: 8, group_size: 3}
train: {steps: 1, batch_size: 6, minibatches: 2}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return get("tiny-random", cache=tmp_path_factory.mktemp("cache"), log=lambda _: None)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def fake_model(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def fake_run(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(RECIPE)
    return folder


def test_a_models_folder_and_a_model_inside_a_run(tmp_path: Path) -> None:
    alone = fake_model(tmp_path / "alone" / "m")
    assert find_model(str(alone)).folder == alone
    assert find_model(str(alone)).run_dir is None
    run = fake_run(tmp_path / "run")
    best = fake_model(run / "best")
    assert (find_model(str(best)).folder, find_model(str(best)).run_dir) == (best, run)
    (best / "best.json").write_text('{"metric": "score", "step": 7}')
    (alone / "best.json").write_text('{"step": 7}')
    assert (find_model(str(best)).policy_version, find_model(str(alone)).policy_version) == (7, 0)


def test_a_run_and_its_checkpoints(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run")
    with pytest.raises(UserError, match="has left no model yet"):
        find_model(str(run))

    def save(folder: Path) -> None:
        fake_model(folder / "model")

    steps = [write_cut(run, step, save=save, state={"version": step}, keep_last=2) for step in (1, 2)]
    assert find_model(str(run)) == TrainedModel(steps[1] / "model", run, 2)
    assert find_model(str(steps[0])).policy_version == 1
    assert find_model(str(steps[0])).folder == steps[0] / "model"
    assert find_model(str(steps[0])).run_dir == run
    assert find_model(str(steps[0] / "model")).run_dir == run
    (run / "summary.json").write_text('{"steps": 3}')
    assert find_model(str(fake_model(run / "model").parent)) == TrainedModel(run / "model", run, 3)


def test_no_model_at_all(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds neither a model"):
        find_model(str(tmp_path / "empty"))
    with pytest.raises(UserError, match="there is no folder"):
        find_model(str(tmp_path / "gone"))
    fake_run(tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text("{}")
    with pytest.raises(UserError, match="has no model in it"):
        find_model(str(checkpoint))


def test_the_digest_is_of_the_weights(tmp_path: Path) -> None:
    folder = fake_model(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"abc")
    before = weights_digest(folder)
    (folder / "config.json").write_text("{ }")
    assert weights_digest(folder) == before
    (folder / "model.safetensors").write_bytes(b"abd")
    assert weights_digest(folder) != before


def test_settings_of_an_evaluation() -> None:
    values = {
        "model": {"path": "x"},
        "data": {"train": {"source": "sums"}, "val": {"source": "sums", "limit": 5}},
        "train": {"steps": 9, "batch_size": 8},
        "algorithm": {"name": "ppo"},
        "dock": {"staleness": 2},
        "rollout": {"temperature": 0.0},
    }
    config = evaluation_config(loads(values), Path("out"))
    assert config.data.train == config.data.val
    assert config.algorithm.flow == "policy"
    assert config.run.dir == "out"
    assert config.dock.staleness == 0
    assert not config.validation.greedy, "at temperature 0 every sample is greedy"
    assert config.groups_per_step >= 1
    warm = evaluation_config(loads(values | {"rollout": {"temperature": 0.7}}), Path("out"))
    assert warm.validation.greedy


def test_prepared(tiny: Path, recipe: Path, tmp_path: Path) -> None:
    prepared = prepare(
        str(tiny), recipe, ["data.val.limit=3"], samples=4, temperature=0.5, out=tmp_path / "o" / "f.json"
    )
    report = prepared.report
    assert report.model.path == tiny
    assert len(report.held_out()) == 3
    assert report.config.validation.samples_per_prompt == 4
    assert report.config.rollout.temperature == 0.5
    assert [plan.stages for plan in report.workers] == [(WEIGHTS, "reward", "rollout")]
    assert [row.name for row in report.table] == ["rollout", "reward", "validate"]
    assert prepared.samples_file == tmp_path / "o" / "f.samples.jsonl"
    assert list((tmp_path / "o").iterdir()) == []


def test_a_split_placement_has_the_weights_in_a_process_of_their_own(tiny: Path, recipe: Path, tmp_path: Path) -> None:
    split = ["placement.runtime=ray", "placement.layout=split", "placement.threads_per_process=1"]
    prepared = prepare(str(tiny), recipe, split, out=tmp_path / "f.json")
    assert [(plan.name, plan.stages) for plan in prepared.report.workers] == [
        ("trainer", (WEIGHTS,)),
        ("sampler-0", ("reward", "rollout")),
    ]


def test_what_is_refused(tiny: Path, recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "f.json"
    with pytest.raises(UserError, match="give --recipe"):
        prepare(str(tiny), None, out=out)
    with pytest.raises(UserError, match=r"samples_per_prompt is 0"):
        prepare(str(tiny), recipe, samples=0, out=out)
    with pytest.raises(UserError, match=r"rollout\.temperature is -1"):
        prepare(str(tiny), recipe, temperature=-1, out=out)
    with pytest.raises(UserError, match=r"unknown key rollout\.temperatur"):
        prepare(str(tiny), recipe, ["rollout.temperatur=1"], out=out)
    with pytest.raises(UserError, match=r"ends in \.json"):
        prepare(str(tiny), recipe, out=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        prepare(str(tiny), recipe, out=tmp_path / "file" / "f.json")
    recipe.write_text(RECIPE.replace("  val:", "  # val:"))
    with pytest.raises(UserError, match=r"set data\.val\.source"):
        prepare(str(tiny), recipe, out=out)


def test_a_run_says_what_to_ask_and_where_to_write(tiny: Path, tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run")
    (run / "model").symlink_to(tiny)
    prepared = prepare(str(run), None)
    assert prepared.recipe == run / "config.yaml"
    assert prepared.out.parent == run / "evals"
    assert json.loads(json.dumps(prepared.report.config.model_dump(mode="json")))["model"]["path"] == str(run / "model")
