"""The dataflow table is sound, and the check finds each way in which it might not be."""

from __future__ import annotations

import pytest

from tranship.config import AlgorithmConfig, CorrectionConfig, KlConfig, RewardModelConfig
from tranship.config.presets import ALGORITHMS
from tranship.stages import StageSpec, check_table, stage_table
from tranship.stages.table import evaluation_table
from tranship.types import UserError


@pytest.mark.parametrize("model", [None, "some/model"])
@pytest.mark.parametrize("correction", ["none", "decoupled"])
@pytest.mark.parametrize("where", ["loss", "reward"])
@pytest.mark.parametrize("coef", [0.0, 0.1])
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_table_of_ours_is_sound(name: str, coef: float, where: str, correction: str, model: str | None) -> None:
    if ALGORITHMS[name].flow in ("dpo", "sft"):
        where, correction = "loss", "none"
    algorithm = AlgorithmConfig(
        name=name, kl=KlConfig(coef=coef, where=where), correction=CorrectionConfig(name=correction)
    )
    check_table(stage_table(algorithm, RewardModelConfig(path=model)))
    check_table(evaluation_table(RewardModelConfig(path=model)))


def names(algorithm: AlgorithmConfig) -> list[str]:
    return [row.name for row in stage_table(algorithm)]


def reads(algorithm: AlgorithmConfig, name: str) -> tuple[str, ...]:
    return next(row for row in stage_table(algorithm) if row.name == name).reads


def test_reference_is_there_only_with_a_kl_term() -> None:
    assert "reference" not in names(AlgorithmConfig())
    assert "ref_logprobs" in reads(AlgorithmConfig(kl=KlConfig(coef=0.1)), "train")


def test_a_kl_in_the_reward_is_the_advantage_stages_and_not_the_losss() -> None:
    algorithm = AlgorithmConfig(kl=KlConfig(coef=0.1, where="reward"))
    assert "ref_logprobs" in reads(algorithm, "advantage")
    assert "ref_logprobs" not in reads(algorithm, "train")


def test_ppo_is_grpos_table_with_one_more_row_and_two_that_read_more() -> None:
    plain, ppo = stage_table(AlgorithmConfig()), stage_table(AlgorithmConfig(name="ppo"))
    assert [row.name for row in ppo if row.name != "value"] == [row.name for row in plain]
    changed = [row.name for row in ppo if row.name != "value" and row not in plain]
    assert changed == ["advantage", "train"]


def test_recorded_data_is_sampled_for_validation_alone() -> None:
    table = {row.name: row for row in stage_table(AlgorithmConfig(name="dpo"))}
    assert table["rollout"].kinds == table["reward"].kinds == ("val",)
    assert table["recorded"].kinds == ("train",)
    assert "logprobs" not in table["train"].reads
    assert "ref_logprobs" in table["train"].reads
    assert "reference" not in names(AlgorithmConfig(name="sft"))


def test_a_column_that_only_the_other_kind_has_is_refused() -> None:
    table = [StageSpec("a", reads=(), writes=("x",), kinds=("val",)), StageSpec("b", reads=("x",), kinds=("train",))]
    with pytest.raises(UserError, match="'b' reads"):
        check_table(table)


def test_a_column_that_nobody_wrote_is_refused() -> None:
    with pytest.raises(UserError, match=r"'late' reads \['values'\], which no earlier stage writes"):
        check_table([StageSpec("late", reads=("prompt", "values"))])


def test_a_column_read_before_it_is_written_is_refused() -> None:
    table = [StageSpec("early", reads=("response",)), StageSpec("rollout", reads=("prompt",), writes=("response",))]
    with pytest.raises(UserError, match="'early' reads"):
        check_table(table)


def test_a_column_written_twice_is_refused() -> None:
    table = [StageSpec("a", reads=(), writes=("x",)), StageSpec("b", reads=(), writes=("x",))]
    with pytest.raises(UserError, match="'x' is written by 'a' and again by 'b'"):
        check_table(table)


def test_a_stage_that_stands_twice_is_refused() -> None:
    with pytest.raises(UserError, match="'a' stands twice"):
        check_table([StageSpec("a", reads=()), StageSpec("a", reads=())])
