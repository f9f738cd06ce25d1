"""A reward's function, found by its name and made into a call of one row. Runs in the reward's own process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tranship.lookup import resolve
from tranship.rewards.http import HttpReward
from tranship.rewards.request import BY_NAME, POSITIONAL
from tranship.rewards.table import REWARDS
from tranship.rewards.trl import trl_reward
from tranship.types import UserError

Row = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A function of one row. is_async: what it returns is to be awaited."""

    run: Callable[[Row], Any]
    is_async: bool


def load(name: str, args: dict[str, Any], setting: str = "reward.function") -> Call:
    """The function `name` as a call of one row.

    name: a built-in name, module:function, file.py:function, http(s)://..., or trl:module:function. A class is
    constructed once with `args`, and its object is called; a function gets `args` in each call. Both get verl's four
    arguments, and by name those of `BY_NAME` that their signature has (`args` comes first where both give one).
    Raises UserError where it cannot be called so.
    """
    if name.startswith(("http://", "https://")):
        return _call(_construct(HttpReward, {"url": name, **args}, name, setting), {}, name, setting)
    if name.startswith("trl:"):
        function = resolve(name.removeprefix("trl:"), {}, setting)
        return _call(trl_reward(_callable(function, name, setting), args), {}, name, setting)
    function = _callable(resolve(name, REWARDS, setting), name, setting)
    if inspect.isclass(function):
        return _call(_construct(function, args, name, setting), {}, name, setting)
    return _call(function, args, name, setting)


def _callable(function: Any, name: str, setting: str) -> Callable[..., Any]:
    if not callable(function):
        raise UserError(f"{setting}: {name} is a {type(function).__name__}, not a function")
    return function


def _construct(kind: type, args: dict[str, Any], name: str, setting: str) -> Callable[..., Any]:
    try:
        made = kind(**args)
    except UserError as error:
        raise UserError(f"{setting}: {name}: {error}") from error
    except TypeError as error:
        raise UserError(f"{setting}: {name} cannot be made with the arguments {args or '{}'}: {error}") from error
    return _callable(made, name, setting)


def _call(function: Callable[..., Any], args: dict[str, Any], name: str, setting: str) -> Call:
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    signature = inspect.signature(function)
    has = {key for key, value in signature.parameters.items() if value.kind is not inspect.Parameter.VAR_KEYWORD}
    more = [key for key in BY_NAME if key in has and key not in args]
    extra = dict.fromkeys(more)
    try:
        signature.bind(**dict.fromkeys(POSITIONAL), **extra, **args)
        return Call(lambda row: function(**_given(row, (*POSITIONAL, *more)), **args), is_async)
    except TypeError as error:
        by_name = error
    try:
        signature.bind(*POSITIONAL, **extra, **args)
        return Call(lambda row: function(*(row[key] for key in POSITIONAL), **_given(row, more), **args), is_async)
    except TypeError:
        raise UserError(
            f"{setting}: {name}{signature} cannot be called with ({', '.join(POSITIONAL)}) and the arguments "
            f"{args or '{}'}: {by_name}"
        ) from by_name


def _given(row: Row, names: Iterable[str]) -> dict[str, Any]:
    return {name: row if name == "row" else row[name] for name in names}
