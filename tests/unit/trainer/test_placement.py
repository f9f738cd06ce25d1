"""Placements host every stage of the table exactly once a group of workers."""

from __future__ import annotations

from tranship.config import AlgorithmConfig, KlConfig, PlacementConfig
from tranship.stages import stage_table
from tranship.trainer.placement import place

TABLE = stage_table(AlgorithmConfig(kl=KlConfig(coef=0.1)))


def test_fused_hosts_all_in_one() -> None:
    (plan,) = place(PlacementConfig(), TABLE)
    assert plan.stages == ("train", "advantage", "reference", "reward", "rollout")


def test_split_separates_sampling_from_training() -> None:
    trainer, *samplers = place(PlacementConfig(runtime="ray", layout="split", num_samplers=2), TABLE)
    assert trainer.stages == ("train", "advantage", "reference")
    assert [s.stages for s in samplers] == [("reward", "rollout")] * 2
    assert len({s.name for s in samplers}) == 2


def test_a_sampler_may_have_several_ranks_and_the_trainer_has_one() -> None:
    trainer, *samplers = place(PlacementConfig(runtime="ray", layout="split", num_samplers=2), TABLE, num_ranks=3)
    assert trainer.num_ranks == 1
    assert [s.num_ranks for s in samplers] == [3, 3]


def test_without_a_reference_nobody_hosts_one() -> None:
    plans = place(PlacementConfig(runtime="ray", layout="split"), stage_table(AlgorithmConfig()))
    assert all("reference" not in plan.stages for plan in plans)
