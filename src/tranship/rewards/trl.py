"""Functions with TRL's signature of lists, called with lists of one sample."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tranship.rewards.request import BY_NAME, POSITIONAL
from tranship.rewards.scoring import NOT_APPLICABLE

_OWN = ("prompts", "completions", "completion_ids")


def trl_reward(function: Callable[..., Any], args: Mapping[str, Any]) -> Callable[..., Any]:
    """`function` (TRL's: lists of prompts, completions, completion_ids and columns in, a list of floats out) as verl's.

    Each call has lists of length one: a function that compares completions with each other is not supported. Where the
    prompt is a conversation, prompts holds its messages and completions a list of one assistant message; else both hold
    text. Columns: data_source, the ground truth (under args["truth_column"], by default ground_truth) and the entries
    of extra_info, each a list of one; only those that the signature has, unless it takes any. Other args are given as
    they are. A result of None means that this reward does not apply to the sample: it is left out of the sum.
    """
    fixed = {key: value for key, value in args.items() if key != "truth_column"}
    truth_column = args.get("truth_column", "ground_truth")
    parameters = inspect.signature(function).parameters
    takes_any = any(value.kind is inspect.Parameter.VAR_KEYWORD for value in parameters.values())

    def arguments(row: dict[str, Any]) -> dict[str, Any]:
        text, messages = row["solution_str"], row["messages"]
        columns = {**(row["extra_info"] or {}), "data_source": row["data_source"], truth_column: row["ground_truth"]}
        own = {
            "prompts": messages or row["prompt"],
            "completions": [{"role": "assistant", "content": text}] if messages else text,
            "completion_ids": row["completion_ids"],
        }
        lists = {key: [value] for key, value in {**columns, **own}.items()}
        return {key: value for key, value in lists.items() if takes_any or key in parameters} | fixed

    def plain(**row: Any) -> Any:
        return _one(function(**arguments(row)))

    async def asynchronous(**row: Any) -> Any:
        return _one(await function(**arguments(row)))

    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
    made = asynchronous if is_async else plain
    names = (*POSITIONAL, "prompt", "messages", "completion_ids")
    assert set(names) <= {*POSITIONAL, *BY_NAME}
    kind = inspect.Parameter.KEYWORD_ONLY
    made.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])  # type: ignore[attr-defined]
    return made


def _one(result: Any) -> Any:
    if not isinstance(result, list | tuple) or len(result) != 1:
        raise ValueError(f"a TRL reward of one sample returned {result!r:.80}, not a list of one number")
    return NOT_APPLICABLE if result[0] is None else result[0]
