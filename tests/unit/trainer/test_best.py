"""RUN/best holds the best validation's model, whole, whatever happens while it is replaced."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tranship.config.load import loads
from tranship.observe import ValidationRecord
from tranship.observe.scores import Estimate
from tranship.trainer.best import BestKeeper, check_best_metric
from tranship.types import RunError, UserError


def record(score: float, *, greedy: float | None = None, **scores: float) -> ValidationRecord:
    return ValidationRecord("during", 0, score, greedy, 4, 1, 0.1, scores=scores)


def export(text: str) -> Callable[[str], None]:
    def write(folder: str) -> None:
        Path(folder).mkdir()
        (Path(folder) / "model.safetensors").write_text(text)

    return write


def kept(run_dir: Path) -> str:
    return (run_dir / "best" / "model.safetensors").read_text()


def test_values_measured_on_other_prompts_are_not_compared(tmp_path: Path) -> None:
    assert BestKeeper(tmp_path, "score", "max", "one prompt").consider(record(0.7), 1, export("old"))
    assert not BestKeeper(tmp_path, "score", "max", "one prompt").consider(record(0.6), 2, export("same"))
    assert BestKeeper(tmp_path, "score", "max", "twenty prompts").consider(record(0.6), 2, export("new"))
    assert kept(tmp_path) == "new"


def test_only_a_better_value_replaces_the_model(tmp_path: Path) -> None:
    keeper = BestKeeper(tmp_path, "score", "max")
    values = [0.2, 0.2, 0.1, math.nan, 0.5]
    kept_now = [keeper.consider(record(value), step, export(f"v{step}")) for step, value in enumerate(values)]
    assert kept_now == [True, False, False, False, True]
    assert kept(tmp_path) == "v4"
    facts = json.loads((tmp_path / "best" / "best.json").read_text())
    assert facts.pop("measured_on") == ""
    assert facts == {"metric": "score", "mode": "max", "value": 0.5, "step": 4, "when": "during"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best"]


def test_the_first_value_is_kept_even_if_it_is_the_lowest_there_can_be(tmp_path: Path) -> None:
    assert BestKeeper(tmp_path, "score", "max").consider(record(-math.inf), 0, export("a"))
    assert not (tmp_path / "best.json").exists()


def test_less_can_be_better(tmp_path: Path) -> None:
    keeper = BestKeeper(tmp_path, "score_greedy", "min")
    assert keeper.consider(record(0.0, greedy=3.0), 1, export("a"))
    assert not keeper.consider(record(0.0, greedy=4.0), 2, export("b"))
    assert keeper.consider(record(9.0, greedy=2.0), 3, export("c"))
    assert kept(tmp_path) == "c"


def test_a_run_that_goes_on_compares_with_what_is_there(tmp_path: Path) -> None:
    BestKeeper(tmp_path, "score", "max").consider(record(0.5), 3, export("old"))
    again = BestKeeper(tmp_path, "score", "max")
    assert again.best == 0.5
    assert not again.consider(record(0.4), 4, export("worse"))
    assert kept(tmp_path) == "old"
    other = BestKeeper(tmp_path, "score/sums", "max")
    assert other.best is None, "another metric's value cannot be compared"
    assert other.consider(record(0.4, sums=0.1), 5, export("new"))
    assert kept(tmp_path) == "new"


def test_an_export_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    keeper = BestKeeper(tmp_path, "score", "max")
    keeper.consider(record(0.1), 1, export("old"))

    def full(folder: str) -> None:
        export("half")(folder)
        raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match=r"step 2.*No space left.*the one before stays"):
        keeper.consider(record(0.9), 2, full)
    assert kept(tmp_path) == "old"
    assert keeper.best == 0.1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best"]


def test_a_process_that_died_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    BestKeeper(tmp_path, "score", "max").consider(record(0.5), 3, export("old"))
    (tmp_path / "best").rename(tmp_path / ".best.old")
    export("new")(str(tmp_path / ".best.part"))
    assert BestKeeper(tmp_path, "score", "max").best == 0.5
    assert kept(tmp_path) == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best"]


def test_a_metric_that_a_validation_does_not_have(tmp_path: Path) -> None:
    for metric in ("score/gsm8k", "score_greedy", "accuracy"):
        with pytest.raises(UserError, match=rf"best_metric: '{metric}'.*score, score/sums"):
            BestKeeper(tmp_path, metric, "max").consider(record(0.5, sums=0.5), 1, export("a"))


def test_a_source_without_a_scored_sample_is_not_best(tmp_path: Path) -> None:
    empty = ValidationRecord("during", 0, 0.5, None, 4, 1, 0.1, by_source={"sums": dict[str, Estimate]()})
    assert not BestKeeper(tmp_path, "score/sums", "max").consider(empty, 1, export("a"))


def test_a_damaged_note_is_named(tmp_path: Path) -> None:
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "best.json").write_text("{")
    with pytest.raises(UserError, match=r"best\.json cannot be read"):
        BestKeeper(tmp_path, "score", "max")


def configured(metric: str | None, **validation: Any) -> Any:
    data = {"train": {"source": "sums"}, "val": {"source": "sums"}}
    sections = {"model": {"path": "x"}, "data": data, "train": {"steps": 1}, "validation": validation}
    return loads({**sections, "checkpoint": {"best_metric": metric}})


def test_what_can_be_known_at_start() -> None:
    check_best_metric(configured(None), [])
    for metric in ("score", "score_greedy", "score/sums"):
        check_best_metric(configured(metric), ["sums"])
    with pytest.raises(UserError, match=r"data\.val"):
        check_best_metric(configured("score"), [])
    with pytest.raises(UserError, match=r"validation\.every_steps"):
        check_best_metric(configured("score", before_training=False, after_training=False), ["sums"])
    with pytest.raises(UserError, match=r"'score/gsm8k' is not measured; use one of: score, score_greedy, score/sums"):
        check_best_metric(configured("score/gsm8k"), ["sums"])
    with pytest.raises(UserError, match=r"needs validation\.greedy"):
        check_best_metric(configured("score_greedy", greedy=False), ["sums"])
