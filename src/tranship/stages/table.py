"""The dataflow: which stage reads and writes which columns. An algorithm is a table; a check proves it sound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tranship.config import AlgorithmConfig
from tranship.types import UserError

PROMPT_COLUMNS = ("prompt", "prompt_info")


@dataclass(frozen=True)
class StageSpec:
    """One row of the table. Every stage takes whole groups; `train` takes a whole batch of them."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()


ROLLOUT = StageSpec(
    "rollout",
    reads=("prompt", "prompt_info"),
    writes=("response", "response_mask", "logprobs", "policy_versions", "finish_reason"),
)
REWARD = StageSpec("reward", reads=("prompt_info", "response", "finish_reason"), writes=("reward",))
REFERENCE = StageSpec("reference", reads=("prompt", "response"), writes=("ref_logprobs",))
ADVANTAGE = StageSpec(
    "advantage",
    reads=(
        "prompt",
        "prompt_info",
        "response",
        "response_mask",
        "logprobs",
        "policy_versions",
        "finish_reason",
        "reward",
    ),
    writes=("advantages", "loss_mask"),
)
TRAIN = StageSpec("train", reads=("prompt", "response", "policy_versions", "logprobs", "advantages", "loss_mask"))
VALIDATE = StageSpec("validate", reads=("prompt", "prompt_info", "response", "finish_reason", "reward"))


def stage_table(algorithm: AlgorithmConfig) -> tuple[StageSpec, ...]:
    """The stages of an algorithm, in order. `validate` reads held-out groups, the rest training ones."""
    if algorithm.kl.coef == 0:
        return (ROLLOUT, REWARD, ADVANTAGE, TRAIN, VALIDATE)
    train = StageSpec(TRAIN.name, reads=(*TRAIN.reads, "ref_logprobs"))
    return (ROLLOUT, REWARD, REFERENCE, ADVANTAGE, train, VALIDATE)


def check_table(stages: Sequence[StageSpec], sources: Sequence[str] = PROMPT_COLUMNS) -> None:
    """Raise UserError unless every column read was written by an earlier stage, and none is written twice."""
    writer = dict.fromkeys(sources, "the prompts")
    names: set[str] = set()
    for stage in stages:
        if stage.name in names:
            raise UserError(f"stage {stage.name!r} stands twice in the table")
        names.add(stage.name)
        missing = [column for column in stage.reads if column not in writer]
        if missing:
            raise UserError(
                f"stage {stage.name!r} reads {missing}, which no earlier stage writes (written: {list(writer)})"
            )
        for column in stage.writes:
            if column in writer:
                raise UserError(f"column {column!r} is written by {writer[column]!r} and again by {stage.name!r}")
            writer[column] = stage.name
