"""Orders: each row once an epoch, by difficulty with ties that the seed decides, or as a user's function says."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tranship.config.schema import DataConfig, DataSourceConfig
from tranship.data.orders import ORDERS, difficulty, find_order
from tranship.data.promptset import PromptPart, PromptSet
from tranship.data.stream import make_stream
from tranship.types import Prompt, UserError


def prompts(levels: list[float]) -> list[Prompt]:
    return [Prompt(i, np.array([i], np.int32), str(i), "s", extra_info={"n": n}) for i, n in enumerate(levels)]


def data(**settings) -> DataConfig:
    return DataConfig(train=DataSourceConfig(source="sums"), **settings)


@settings(deadline=None, max_examples=60)
@given(levels=st.lists(st.integers(0, 3), min_size=1, max_size=12), seed=st.integers(0, 50), down=st.booleans())
def test_difficulty_rises_or_falls_and_loses_no_row(levels: list[int], seed: int, down: bool):
    order = difficulty(prompts(levels), epoch=1, seed=seed, key="n", descending=down)
    assert sorted(order.tolist()) == list(range(len(levels)))
    found = [levels[place] for place in order]
    assert found == sorted(levels, reverse=down)


def test_ties_depend_on_seed_and_epoch_alone():
    def order(seed: int, epoch: int) -> list[int]:
        return difficulty(prompts([1.0] * 9), epoch=epoch, seed=seed, key="n").tolist()

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(1, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 0) != sorted(order(0, 0))


@pytest.mark.parametrize("value", ["3", None, float("nan"), [1]])
def test_a_row_without_a_number_is_named(value):
    with pytest.raises(UserError, match=r"row 1 has extra_info\['n'\] = .*its keys are \['n'\]"):
        difficulty(prompts([1, value]), epoch=0, seed=0, key="n")


def test_the_table_and_functions_of_users(tmp_path: Path):
    assert all(callable(find_order(data(order=name, order_args={"key": "n"}))) for name in ORDERS)
    file = tmp_path / "mine.py"
    file.write_text(
        "def backwards(prompts, *, epoch, seed, start=0):\n    return list(range(len(prompts)))[::-1]\n"
        "def short(prompts, *, epoch, seed):\n    return [0] * len(prompts)\n"
        "value = 3\n"
    )
    rows = PromptSet(prompts([1, 2, 3]), [], parts=(PromptPart("s", 0, 3, 3),))
    stream = make_stream(rows, data(order=f"{file}:backwards", order_args={"start": 1}), seed=0)
    assert [prompt.index for _, prompt in stream.take(4)] == [2, 1, 0, 2]
    for changes, message in [
        ({"order": f"{file}:short"}, "is not each of 0 to 2 once"),
        ({"order": f"{file}:backwards", "order_args": {"strat": 1}}, "order_args do not fit.*it takes .*start=0"),
        ({"order": f"{file}:value"}, "is a int, not a function"),
        ({"order": "difficulty"}, "order_args do not fit difficulty .*key"),
        ({"order": "difficult"}, "is not known; use one of: difficulty"),
        ({"order": "difficulty", "order_args": {"key": "n"}, "shuffle": False}, "take one of them out"),
        ({"order_args": {"key": "n"}}, "need an order"),
        ({"order": "difficulty", "order_args": {"key": "m"}}, "which is no number"),
    ]:
        with pytest.raises(UserError, match=message):
            make_stream(rows, data(**changes), seed=0)


def test_without_an_order_shuffle_decides():
    rows = PromptSet(prompts([1] * 8), [], parts=(PromptPart("s", 0, 8, 8),))
    given_order = [p.index for _, p in make_stream(rows, data(shuffle=False), seed=3).take(16)]
    assert given_order == [*range(8), *range(8)]
    shuffled = [p.index for _, p in make_stream(rows, data(), seed=3).take(8)]
    assert sorted(shuffled) == list(range(8)) != shuffled
