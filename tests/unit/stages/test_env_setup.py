"""An environment is held against the chat template before a run starts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tranship.config import DataConfig, DataSourceConfig, EnvConfig
from tranship.models.tiny import make_tokenizer
from tranship.stages.env_setup import check_env, check_messages, make_episodes
from tranship.types import Prompt, UserError

WORLDS = Path(__file__).parents[1] / "envs" / "worlds.py"
DATA = DataConfig(train=DataSourceConfig(source="sums"), system_prompt="Be brief.")
KNOWS_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"


def test_tools_go_where_the_model_reads_them() -> None:
    tokenizer = make_tokenizer(600)
    env = EnvConfig(name="calculator")
    told = check_env(env, DATA, tokenizer, [2])
    assert told.tools == ()
    assert told.data.system_prompt is not None
    assert told.data.system_prompt.startswith("Be brief.\n\nYou can call these tools:\n")
    assert '"name": "calculate"' in told.data.system_prompt
    tokenizer.chat_template = KNOWS_TOOLS + tokenizer.chat_template
    known = check_env(env, DATA, tokenizer, [2])
    assert known.data == DATA
    assert [tool["function"]["name"] for tool in known.tools] == ["calculate"]


def test_an_environment_without_tools_changes_nothing() -> None:
    prompts = check_env(EnvConfig(name=f"{WORLDS}:Quiz"), DATA, make_tokenizer(600), [2])
    assert (prompts.data, prompts.tools) == (DATA, ())


def test_a_template_or_world_that_does_not_fit_is_refused() -> None:
    tokenizer = make_tokenizer(600)
    with pytest.raises(UserError, match="is not known"):
        check_env(EnvConfig(name="chess"), DATA, tokenizer, [2])
    with pytest.raises(UserError, match="does not end a turn"):
        check_env(EnvConfig(name="calculator"), DATA, tokenizer, [0])
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        check_env(EnvConfig(name="calculator"), DATA, tokenizer, [2])


def test_plain_prompts_are_refused() -> None:
    ids = np.array([1], np.int32)
    talk = Prompt(0, ids, "", "here", messages=({"role": "user", "content": "q"},))
    check_messages([talk])
    with pytest.raises(UserError, match=r"1 prompts are plain strings \(first: row 7\)"):
        check_messages([talk, Prompt(7, ids, "", "here")])


def test_episodes_have_the_recipes_limits(tmp_path: Path) -> None:
    env = EnvConfig(name=f"{WORLDS}:Quiz", max_turns=3, max_turn_tokens=9, max_observation_tokens=7)
    episodes = make_episodes(
        env, make_tokenizer(600), end_ids=[2], template_args={}, run_seed=1, log_file=tmp_path / "log"
    )
    try:
        limits = episodes._limits
        assert (limits.max_turns, limits.max_turn_tokens, limits.max_observation_tokens) == (3, 9, 7)
        assert episodes.num_waiting == 0
    finally:
        episodes.close()
    assert (tmp_path / "log").is_file()
