"""An environment from the recipe's words: checked before the start, and made where samples are drawn."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tranship.config import DataConfig, EnvConfig, ServeConfig
from tranship.data.turns import TurnEncoder, check_template, reads_tools
from tranship.envs import EnvPool, describe_env, tools_text
from tranship.stages.agents import Agents
from tranship.stages.episodes import Episodes, Limits
from tranship.types import Prompt, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EnvPrompts:
    """How prompts are to be loaded for an environment. data: its system prompt describes the tools where the chat
    template does not. tools: JSON schemas for a template that does (they belong into each Prompt's `tools`)."""

    data: DataConfig
    tools: tuple[dict[str, Any], ...]


def check_env(
    env: EnvConfig, data: DataConfig, tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int]
) -> EnvPrompts:
    """Make the environment once, in a process that ends at once, and hold it against the chat template.

    end_ids: the model's end-of-text ids. Raises UserError where the environment cannot be made, or the template cannot
    carry its conversation. A row's own system message has to describe tools itself where the template does not.
    """
    assert env.name is not None
    spec = describe_env(env.name, env.args)
    told = bool(spec.tools) and not reads_tools(tokenizer, data.template_args)
    tools = () if told else spec.tools
    check_template(tokenizer, end_ids, roles=spec.roles, tools=tools, template_args=data.template_args)
    if told:
        parts = [data.system_prompt] if data.system_prompt else []
        data = data.model_copy(update={"system_prompt": "\n\n".join([*parts, tools_text(spec.tools)])})
    return EnvPrompts(data, tools)


def agent_roles(
    tokenizer: PreTrainedTokenizerBase, end_ids: Sequence[int], template_args: Mapping[str, Any]
) -> tuple[str, ...]:
    """The roles of messages that may follow a turn of the model. Raises UserError where there is none."""
    roles, faults = [], []
    for role in ("user", "tool"):
        try:
            check_template(tokenizer, end_ids, roles=(role,), template_args=template_args)
            roles.append(role)
        except UserError as error:
            faults.append(str(error))
    if not roles:
        raise UserError(f"serve.agents: {faults[0]}")
    return tuple(roles)


def make_agents(
    serve: ServeConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    end_ids: Sequence[int],
    template_args: Mapping[str, Any],
    run_seed: int,
    wakeup: Callable[[], None],
) -> Agents:
    """The samples of a rollout stage that agents make. tokenizer: for the endpoint's threads alone."""
    return Agents(
        TurnEncoder(tokenizer, end_ids, template_args),
        roles=agent_roles(tokenizer, end_ids, template_args),
        limit_s=serve.agent_timeout_s,
        run_seed=run_seed,
        wakeup=wakeup,
    )


def check_messages(prompts: Sequence[Prompt], what: str = "env") -> None:
    """Raise UserError unless all prompts are messages: turns follow them by the chat template. what: needs it."""
    plain = [prompt.index for prompt in prompts if not prompt.messages]
    if plain:
        raise UserError(
            f"{what}: {len(plain)} prompts are plain strings (first: row {plain[0]}): give them as messages"
        )


def make_episodes(
    env: EnvConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    end_ids: Sequence[int],
    template_args: Mapping[str, Any],
    run_seed: int,
    wakeup: threading.Event | None = None,
    log_file: Path | None = None,
) -> Episodes:
    """The sessions of a rollout stage. wakeup: set when an environment has answered. log_file: gets what they print."""
    assert env.name is not None
    pool = EnvPool(
        env.name,
        env.args,
        num_workers=env.num_workers,
        step_timeout_s=env.step_timeout_s,
        memory_bytes=env.memory_bytes,
        wakeup=wakeup,
        log_file=log_file,
    )
    limits = Limits(env.max_turns, env.max_turn_tokens, env.max_observation_tokens)
    return Episodes(pool, TurnEncoder(tokenizer, end_ids, template_args), limits=limits, run_seed=run_seed)
