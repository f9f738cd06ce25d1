"""Arguments from a recipe, checked against the signature of the function that they are for."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tranship.types import UserError


def bind(
    function: Any, inputs: int, args: Mapping[str, Any], *, setting: str, offered: Mapping[str, Any] | None = None
) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """(function with its keyword arguments set, the names in `offered` that it does not take).

    inputs: its leading parameters, which are data. args: what the recipe says, under `setting`
    ("algorithm.loss_args"). offered: values that have settings of their own; it gets those that it has parameters for.
    Raises UserError for an argument that it does not take, one of another kind than its default, or one that is
    missing.
    """
    offered = offered or {}
    parameters, open_ended = _options(function, inputs, setting)
    name = getattr(function, "__name__", str(function))
    own = {key: parameter for key, parameter in parameters.items() if key not in offered}
    for key, value in args.items():
        if key in offered:
            raise UserError(f"{setting}: {key!r} is a setting of its own: set that one, and take it out here")
        if key in own:
            _check_kind(value, own[key].default, f"{setting}: {key} of {name!r}")
        elif not open_ended:
            raise UserError(f"{setting}: {name!r} takes no {key!r}; it takes: {', '.join(own) or 'none'}")
    for key, parameter in own.items():
        if parameter.default is parameter.empty and key not in args:
            raise UserError(f"{setting}: {name!r} needs {key!r}: set it there")
    taken = {key: value for key, value in offered.items() if open_ended or key in parameters}
    return functools.partial(function, **taken, **args), tuple(key for key in offered if key not in taken)


def _options(function: Any, inputs: int, setting: str) -> tuple[dict[str, inspect.Parameter], bool]:
    """(the parameters after the data, whether it takes any others too)."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise UserError(f"{setting}: {function!r} is not a function with a signature: {error}") from error
    options = [p for p in parameters[inputs:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {p.name: p for p in options}, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _check_kind(value: Any, default: Any, what: str) -> None:
    if isinstance(default, bool):
        fits, kind = isinstance(value, bool), "true or false"
    elif isinstance(default, (int, float)):
        fits, kind = isinstance(value, (int, float)) and not isinstance(value, bool), "a number"
    else:
        return
    if not fits:
        raise UserError(f"{what} is {value!r}, not {kind}")
