"""Whether a run may go on from a cut: configuration and data must be the same where they shape what is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tranship.config import Config
from tranship.trainer.checkpoint import Cut
from tranship.types import UserError

# What may change between a cut and its continuation: how long, how observed, and where it runs.
_FREE = (
    "run.dir",
    "run.resume",
    "run.max_restarts",
    "run.export",
    "train.steps",
    "train.microbatch_tokens",
    "train.activation_checkpointing",
    "data.val",
    "rollout.max_running",
    "rollout.tensor_parallel",
    "rollout.cuda_graphs",
    "env.num_workers",
    "env.step_timeout_s",
    "env.memory_bytes",
    "reward.num_workers",
    "reward.timeout_s",
    "reward.memory_mb",
    "reward.model.placement",
    "reward.model.batch_tokens",
    "reward.max_invalid_steps",
    "placement",
    "dock",
    "checkpoint",
    "validation",
    "serve.enabled",
    "serve.host",
    "serve.port",
    "serve.name",
    "serve.agent_timeout_s",
    "observe",
)


def check_resumable(cut: Cut, config: Config, data_digest: str) -> None:
    """Raise UserError naming each setting that differs from the one the checkpoint was written under, or saying that
    the prompts are not the same ones (data_digest: of those of training)."""
    then = dict(_flatten(cut.state["config"]))
    now = dict(_flatten(config.model_dump(mode="json")))
    differing = [
        f"{key} was {then.get(key)!r} and is {now.get(key)!r}"
        for key in sorted(then.keys() | now.keys())
        if then.get(key) != now.get(key) and not _is_free(key)
    ]
    if differing:
        raise UserError(
            f"{cut.folder} was written under other settings: {'; '.join(differing)}: "
            "use the same ones, or start anew with another run.dir"
        )
    if cut.state["data"] != data_digest:
        raise UserError(
            f"{cut.folder} was written with other training prompts than data.train gives now (their digest differs), "
            "so its position in them means nothing: restore the data, or start anew with another run.dir"
        )
    if cut.state["version"] > config.train.steps:
        raise UserError(
            f"{cut.folder} has {cut.state['version']} trained steps, more than train.steps {config.train.steps}"
        )


def _is_free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in _FREE)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
