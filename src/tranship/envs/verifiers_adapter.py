"""Tasks of the public package `verifiers` (0.4, its v1 stack) that one answer solves: their prompts, and their rewards.

In that stack a task's further turns are made by a harness: a program of its own, in a container or sandbox, that calls
the model through a server. Such tasks (with tools, a user simulator, rewards or judges that need the running container)
are refused, not half played. The package is no dependency of ours: pip install "verifiers>=0.4,<0.5".
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import itertools
import math
from collections.abc import Mapping
from typing import Any

from tranship.envs.env import Message, Step
from tranship.lookup import resolve
from tranship.types import UserError


class VerifiersEnv:
    """One turn of the model, scored by the task's own rewards (their weighted sum) and metrics.

    taskset: the id of an installed taskset, or module:Class. config: its settings. limit: use only so many of its
    tasks (needed where it has no end). The row's ground truth is the task's position, as `rows` gives it.
    """

    tools = ()
    roles = ("user",)

    def __init__(self, taskset: str, config: Mapping[str, Any] | None = None, limit: int | None = None) -> None:
        self._tasks = _load(taskset, config or {}, limit)
        self._task: Any = None

    def reset(self, prompt_info: dict[str, Any], seed: int) -> list[Message]:
        """Take the row's task."""
        position = prompt_info["ground_truth"]
        if not isinstance(position, int) or not 0 <= position < len(self._tasks):
            raise UserError(f"the ground truth {position!r:.40} is no position of one of {len(self._tasks)} tasks")
        self._task = self._tasks[position]
        return []

    def step(self, message: Message) -> Step:
        """Score the answer. Raises what a reward raises, and ValueError where one gives no number."""
        trace = _trace(self._task, message["content"], message["finish_reason"])
        asyncio.run(self._task.score(trace))
        missing = [name for name, reward in trace.rewards.items() if reward is None]
        if missing or not math.isfinite(trace.reward):
            raise ValueError(f"the task gave the rewards {trace.rewards}")
        return Step(reward=float(trace.reward), done=True, info=dict(trace.metrics))


def rows(taskset: str, config: Mapping[str, Any] | None = None, limit: int | None = None) -> list[dict[str, Any]]:
    """The tasks' prompts in verl's schema; give it the same arguments as `env.args`."""
    return [
        {
            "data_source": taskset,
            "prompt": _prompt(task),
            "ability": "verifiers",
            "reward_model": {"style": "env", "ground_truth": position},
            "extra_info": {"index": position, "name": task.data.name},
        }
        for position, task in enumerate(_load(taskset, config or {}, limit))
    ]


def _package() -> Any:
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise UserError(
            f"env verifiers: the package cannot be imported ({error}): pip install 'verifiers>=0.4,<0.5'"
        ) from error


def _load(name: str, config: Mapping[str, Any], limit: int | None) -> list[Any]:
    vf = _package()
    if ":" in name:
        kind = resolve(name, {}, "env.args.taskset")
        if not (isinstance(kind, type) and issubclass(kind, vf.Taskset)):
            raise UserError(f"env.args.taskset: {name} is no Taskset of verifiers")
        taskset = kind(_config_type(vf, kind)(**config))
    else:
        taskset = vf.load_taskset(vf.taskset_config_type(name)(id=name, **config))
    if limit is None and not taskset.bounded:
        raise UserError(f"env.args: the taskset {name} has no end: set limit")
    tasks = list(itertools.islice(taskset, limit))
    if not tasks:
        raise UserError(f"env.args: the taskset {name} has no task")
    _check(name, taskset, tasks[0])
    return tasks


def _config_type(vf: Any, kind: type) -> type:
    generic = importlib.import_module("verifiers.v1.utils.generic")
    return generic.concrete_type(kind, vf.TasksetConfig) or vf.TasksetConfig


def _check(name: str, taskset: Any, task: Any) -> None:
    """Raise UserError unless one answer, and nothing but its text, decides the reward of these tasks (of one type)."""
    base = _package().Task
    prepares = type(task).setup is not base.setup or type(task).finalize is not base.finalize
    scorers = [*task.hooks("reward"), *task.hooks("metric"), *(judge.score for judge in task.plugged_judges())]
    for needs, what in (
        (type(task).NEEDS_CONTAINER, "a container"),
        (bool(type(task).toolsets(task.config) or type(taskset).toolsets(taskset.config)), "tools"),
        (prepares, "steps of their own before or after the answer (setup, finalize)"),
        (task.data.prompt is None, "a user who begins"),
        (any(_needs_runtime(scorer) for scorer in scorers), "rewards or metrics that look into a runtime"),
        (not task.hooks("reward") and not task.plugged_judges(), "another judge, since it has no reward"),
    ):
        if needs:
            raise UserError(
                f"env.args: the tasks of {name} need {what}: this adapter takes tasks that one answer solves"
            )


def _needs_runtime(function: Any) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _prompt(task: Any) -> list[dict[str, Any]]:
    data = task.data
    messages = [{"role": "system", "content": data.system_prompt}] if data.system_prompt is not None else []
    if isinstance(data.prompt, str):
        return [*messages, {"role": "user", "content": data.prompt}]
    for message in data.prompt:
        if not isinstance(message.content, str):
            raise UserError(f"env verifiers: task {data.idx} has a {message.role} message that is not text alone")
        messages.append({"role": message.role, "content": message.content})
    return messages


def _trace(task: Any, answer: str, finish_reason: str) -> Any:
    """The record of a conversation that `Task.score` reads: the prompt, and the model's answer."""
    vf, states = _package(), importlib.import_module("verifiers.v1.state")
    nodes = [
        vf.MessageNode(parent=index - 1 if index else None, message=message)
        for index, message in enumerate(_prompt(task))
    ]
    answered = vf.MessageNode(parent=len(nodes) - 1, message=vf.AssistantMessage(content=answer), sampled=True)
    return vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        state=states.state_cls(type(task))(),
        nodes=[*nodes, answered],
        calls=[vf.ModelCall(node=len(nodes), finish_reason=finish_reason)],
        is_completed=True,
        ok=True,
    )
