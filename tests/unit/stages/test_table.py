"""The dataflow table is sound, and the check finds each way in which it might not be."""

from __future__ import annotations

import pytest

from tranship.config import AlgorithmConfig, KlConfig
from tranship.stages import StageSpec, check_table, stage_table
from tranship.types import UserError


@pytest.mark.parametrize("coef", [0.0, 0.1])
def test_every_table_of_ours_is_sound(coef: float) -> None:
    check_table(stage_table(AlgorithmConfig(kl=KlConfig(coef=coef))))


def test_reference_is_there_only_with_a_kl_term() -> None:
    without = {stage.name for stage in stage_table(AlgorithmConfig())}
    with_kl = stage_table(AlgorithmConfig(kl=KlConfig(coef=0.1)))
    assert "reference" not in without
    assert "ref_logprobs" in next(stage for stage in with_kl if stage.name == "train").reads


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
