"""Worlds that answer the model: environments by name, run in processes that can be killed. Imports no torch."""

from tranship.envs.answer import Answer, EnvSpec
from tranship.envs.env import ENVS, Env, Step
from tranship.envs.pool import EnvPool, describe_env
from tranship.envs.tools import ToolEnv, ToolError, tools_text

__all__ = [
    "ENVS",
    "Answer",
    "Env",
    "EnvPool",
    "EnvSpec",
    "Step",
    "ToolEnv",
    "ToolError",
    "describe_env",
    "tools_text",
]
