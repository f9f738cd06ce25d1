"""Placements as values: which worker hosts which stages. The loop is the same for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tranship.config import PlacementConfig
from tranship.stages import StageSpec

# A stage that is nearer to the update is served first, so that work which is done is used before more is begun.
_SERVED_FIRST = (
    "train",
    "advantage",
    "value",
    "reference",
    "reward_model",
    "recorded",
    "reward",
    "rollout",
)
# Rewards run in processes of their own, which a rollout step of some milliseconds does not hold up as an update would.
_SAMPLER_STAGES = ("reward", "rollout")


@dataclass(frozen=True)
class WorkerPlan:
    """One worker process: its name and the stages that it hosts, in the order in which they are served.

    num_ranks: processes that hold its sampler's model together, of which it is the first.
    """

    name: str
    stages: tuple[str, ...]
    num_ranks: int = 1


def place(
    placement: PlacementConfig, table: Sequence[StageSpec], *, own_reward_model: bool = False, num_ranks: int = 1
) -> tuple[WorkerPlan, ...]:
    """The workers of a placement; the one that trains comes first. `validate` belongs to the coordinator.

    own_reward_model: the reward model has a process of its own, not the trainer's. num_ranks: of each sampler.
    """
    known = {stage.name for stage in table}
    assert known <= {*_SERVED_FIRST, "validate"}, known
    if own_reward_model:
        known.discard("reward_model")
    apart = (WorkerPlan("reward-model", ("reward_model",)),) if own_reward_model else ()
    names = [name for name in _SERVED_FIRST if name in known]
    if placement.layout == "fused":
        return (WorkerPlan("fused", tuple(names)), *apart)
    trainer = WorkerPlan("trainer", tuple(name for name in names if name not in _SAMPLER_STAGES))
    sampler_stages = tuple(name for name in names if name in _SAMPLER_STAGES)
    samplers = (WorkerPlan(f"sampler-{i}", sampler_stages, num_ranks) for i in range(placement.num_samplers))
    return (trainer, *samplers, *apart)
