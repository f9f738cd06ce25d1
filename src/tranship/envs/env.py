"""What an environment is, and the table of the built-in ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from tranship.lookup import resolve
from tranship.types import UserError

Message = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """What the world says to one turn of the model.

    messages: dicts with role (tool or user) and content (a string), which the model sees before its next turn; they
    are dropped where no turn follows. reward: of this turn (a finite number), or None where there is none yet; a
    sample's rewards add up. done: no turn follows. info: JSON values for metrics; the counts tool_calls and
    tool_errors are added up over a sample, of other entries the last value stands.
    """

    messages: list[Message] = field(default_factory=list)
    reward: float | None = None
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class Env(Protocol):
    """One world. It is made once, with `env.args`; each sample then works on a copy in a process of its own.

    tools: typed Python functions that the model may call; their schemas (name, docstring, parameters) are given to the
    chat template. roles: those of the messages that it answers with. Threads and open connections that the constructor
    makes do not reach the copies: open what a sample needs in `reset`.
    """

    tools: Sequence[Callable[..., Any]]
    roles: Sequence[str]

    def reset(self, prompt_info: dict[str, Any], seed: int) -> list[Message]:
        """Begin a sample; returns messages that follow the prompt (mostly none).

        prompt_info: index, text, data_source, ground_truth, ability, extra_info, messages of the row. seed: of this
        sample; the world's randomness has to come from it alone. Messages that are returned stand after an empty turn
        of the assistant, since the prompt's tokens end with the beginning of one.
        """
        ...

    def step(self, message: Message) -> Step:
        """Answer a turn of the model.

        message: role, content (its text), finish_reason ("length": it was cut), tool_calls: those found in the text,
        as {name, arguments}, or {error} where one cannot be read.
        """
        ...


ENVS: Mapping[str, str] = {
    "calculator": "tranship.envs.calculator:Calculator",
    "search": "tranship.envs.search:Search",
    "code": "tranship.envs.code:Code",
    "verifiers": "tranship.envs.verifiers_adapter:VerifiersEnv",
}


def make_env(name: str, args: Mapping[str, Any]) -> Env:
    """The environment `name`, an entry of the table or module:name, made with `args`. UserError where that fails."""
    factory = resolve(name, ENVS, "env.name")
    if not callable(factory):
        raise UserError(f"env.name: {name} is a {type(factory).__name__}, not a class or function")
    try:
        env = factory(**args)
    except UserError:
        raise
    except TypeError as error:
        raise UserError(f"env.name: {name} does not take env.args {dict(args)}: {error}") from error
    except Exception as error:
        raise UserError(f"env.name: {name} failed: {type(error).__name__}: {error}") from error
    for member in ("reset", "step"):
        if not callable(getattr(env, member, None)):
            raise UserError(f"env.name: {name} gives a {type(env).__name__}, which has no method {member}")
    return cast(Env, env)
