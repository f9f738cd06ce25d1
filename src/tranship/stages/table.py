"""The dataflow: which stage reads and writes which columns. An algorithm is a table; a check proves it sound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tranship.config import AlgorithmConfig, RewardModelConfig
from tranship.dock.messages import Kind
from tranship.types import UserError

PROMPT_COLUMNS = ("prompt", "prompt_info")
BOTH: tuple[Kind, ...] = ("val", "train")
NO_REWARD_MODEL = RewardModelConfig()


@dataclass(frozen=True)
class StageSpec:
    """One row of the table. Every stage takes whole groups; `train` takes a whole batch of them.

    kinds: of the groups that it works on; held-out ones come first where both are ready.
    """

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    kinds: tuple[Kind, ...] = ("train",)


ROLLOUT = StageSpec(
    "rollout",
    reads=("prompt", "prompt_info"),
    writes=("response", "response_mask", "logprobs", "policy_versions", "finish_reason", "rollout_info"),
    kinds=BOTH,
)
REWARD_MODEL = StageSpec("reward_model", reads=("prompt", "response"), writes=("model_score",), kinds=BOTH)
REWARD = StageSpec(
    "reward",
    reads=("prompt_info", "response", "finish_reason", "rollout_info"),
    writes=("reward",),
    kinds=BOTH,
)
REFERENCE = StageSpec("reference", reads=("prompt", "response"), writes=("ref_logprobs",))
VALUE = StageSpec("value", reads=("prompt", "response"), writes=("values",))
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
        "rollout_info",
        "reward",
    ),
    writes=("advantages", "loss_mask"),
)
RECORDED = StageSpec(
    "recorded",
    reads=("prompt", "prompt_info"),
    writes=("response", "advantages", "loss_mask"),
)
TRAIN = StageSpec("train", reads=("prompt", "response", "advantages", "loss_mask"))
VALIDATE = StageSpec(
    "validate", reads=("prompt", "prompt_info", "response", "finish_reason", "rollout_info", "reward"), kinds=("val",)
)


def stage_table(algorithm: AlgorithmConfig, reward_model: RewardModelConfig = NO_REWARD_MODEL) -> tuple[StageSpec, ...]:
    """The stages of an algorithm, in order.

    Demonstrations and preferences (sft, dpo) are recorded, not sampled: there only held-out groups go through rollout
    and reward.
    """
    recorded = algorithm.flow in ("sft", "dpo")
    has_model, has_reference = reward_model.path is not None, algorithm.kl.coef > 0 or algorithm.flow == "dpo"
    kl_in_reward = algorithm.kl.coef > 0 and algorithm.kl.where == "reward"
    critic = algorithm.flow == "ppo"
    reward = _more(REWARD, reads=("model_score",)) if has_model else REWARD
    rows: list[StageSpec] = []
    if recorded:
        rows.append(RECORDED)
    sampling = [ROLLOUT, *([REWARD_MODEL] if has_model else []), reward]
    rows += [replace(row, kinds=("val",)) for row in sampling] if recorded else sampling
    rows += [REFERENCE] if has_reference else []
    rows += [VALUE] if critic else []
    if not recorded:
        reads = (*(("ref_logprobs",) if kl_in_reward else ()), *(("values",) if critic else ()))
        rows.append(_more(ADVANTAGE, reads=reads, writes=("returns",) if critic else ()))
    needed = (
        *(() if recorded else ("policy_versions", "logprobs")),
        *(("ref_logprobs",) if has_reference and not kl_in_reward else ()),
        *(("values", "returns") if critic else ()),
    )
    return (*rows, _more(TRAIN, reads=needed), VALIDATE)


def evaluation_table(reward_model: RewardModelConfig = NO_REWARD_MODEL) -> tuple[StageSpec, ...]:
    """The stages that score a model on held-out prompts and train nothing."""
    has_model = reward_model.path is not None
    reward = _more(REWARD, reads=("model_score",)) if has_model else REWARD
    rows = [ROLLOUT, *([REWARD_MODEL] if has_model else []), reward]
    return (*(replace(row, kinds=("val",)) for row in rows), VALIDATE)


def check_table(stages: Sequence[StageSpec], sources: Sequence[str] = PROMPT_COLUMNS) -> None:
    """Raise UserError unless, for groups of each kind, every column read was written by an earlier stage, and none is
    written twice."""
    names = [stage.name for stage in stages]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"stage {name!r} stands twice in the table")
    for kind in BOTH:
        _check_kind([stage for stage in stages if kind in stage.kinds], sources)


def _check_kind(stages: Sequence[StageSpec], sources: Sequence[str]) -> None:
    writer = dict.fromkeys(sources, "the prompts")
    for stage in stages:
        missing = [column for column in stage.reads if column not in writer]
        if missing:
            raise UserError(
                f"stage {stage.name!r} reads {missing}, which no earlier stage writes (written: {list(writer)})"
            )
        for column in stage.writes:
            if column in writer:
                raise UserError(f"column {column!r} is written by {writer[column]!r} and again by {stage.name!r}")
            writer[column] = stage.name


def _more(stage: StageSpec, *, reads: tuple[str, ...] = (), writes: tuple[str, ...] = ()) -> StageSpec:
    return replace(stage, reads=(*stage.reads, *reads), writes=(*stage.writes, *writes))
