"""Orders of an epoch: which row comes when. An order gives each row once; the stream checks that.

An order is a function `order(prompts, *, epoch, seed, **order_args)` that gives a permutation of
`range(len(prompts))`: which prompt is first, second, ... in epoch `epoch` (from 0). It must depend on its arguments
alone: a resumed run asks for the same epoch again. In a mixture it is asked for each part by itself, with a seed and
epochs of the part's own.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

import numpy as np

from tranship.config.schema import DataConfig
from tranship.lookup import resolve
from tranship.types import Prompt, UserError

Order = Callable[..., Sequence[int] | np.ndarray]

ORDERS: Mapping[str, str] = {"difficulty": "tranship.data.orders:difficulty"}


def find_order(data: DataConfig) -> Order:
    """The order that data.order and data.shuffle ask for. Raises UserError where its arguments do not fit."""
    if data.order is None:
        if data.order_args:
            raise UserError(
                f"data.order_args {sorted(data.order_args)} need an order: set data.order, or take them out"
            )
        return shuffled if data.shuffle else as_given
    if not data.shuffle:
        raise UserError(f"data.order={data.order} decides the order, and data.shuffle=false too: take one of them out")
    order: Order = resolve(data.order, ORDERS, "data.order")
    if not callable(order):
        raise UserError(f"data.order: {data.order!r} is a {type(order).__name__}, not a function")
    try:
        inspect.signature(order).bind([], epoch=0, seed=0, **data.order_args)
    except TypeError as error:
        raise UserError(
            f"data.order_args do not fit {data.order} ({error}): it takes {inspect.signature(order)}"
        ) from error
    return partial(order, **data.order_args)


def as_given(prompts: Sequence[Prompt], *, epoch: int, seed: int) -> np.ndarray:
    """The order of the source, in every epoch."""
    return np.arange(len(prompts))


def shuffled(prompts: Sequence[Prompt], *, epoch: int, seed: int) -> np.ndarray:
    """A random order that (seed, epoch) decides."""
    return permutation(seed, epoch, len(prompts))


def difficulty(prompts: Sequence[Prompt], *, epoch: int, seed: int, key: str, descending: bool = False) -> np.ndarray:
    """From easy to hard by the number extra_info[key], in every epoch; equal ones in a random order of (seed, epoch).

    descending: from the highest number to the lowest. Raises UserError where a row has no such number.
    """
    values = np.array([_number(prompt, key) for prompt in prompts])
    ties = permutation(seed, epoch, len(prompts))
    return ties[np.argsort((-values if descending else values)[ties], kind="stable")]


@lru_cache(maxsize=8)
def permutation(seed: int, epoch: int, count: int) -> np.ndarray:
    """A permutation of count rows: the raw bits of Philox, sorted, so that no later version of numpy changes it."""
    key = np.array([seed % 2**64, epoch], np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


def _number(prompt: Prompt, key: str) -> float:
    value = prompt.extra_info.get(key)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(
            f"data.order=difficulty: row {prompt.index} has extra_info[{key!r}] = {value!r:.40}, which is no number: "
            f"its keys are {sorted(prompt.extra_info)}"
        )
    return float(value)
