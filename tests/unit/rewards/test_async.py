"""Asynchronous functions: many in flight, each with its own limit, and a bad one costs its own sample alone."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tranship.rewards import RewardPool, RewardRequest, Term
from tranship.types import Score, UserError

FUNCTIONS = """
import asyncio, os, sys, time

running = most = 0

async def waits(data_source, solution_str, ground_truth, extra_info=None, weight=1.0):
    global running, most
    running += 1
    most = max(most, running)
    try:
        await asyncio.sleep(0.3)
    finally:
        running -= 1
    return {"score": weight, "most": most, "pid": os.getpid()}

async def bad_rows(data_source, solution_str, ground_truth, extra_info=None):
    kind = solution_str
    await asyncio.sleep(0.05)
    if kind == "raise":
        raise ValueError("bad row")
    if kind == "sleep":
        await asyncio.sleep(60)
    if kind == "stubborn":
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                pass
    if kind == "block":
        time.sleep(60)
    if kind == "exit":
        os._exit(1)
    if kind == "sys.exit":
        sys.exit(3)
    if kind == "cancel":
        raise asyncio.CancelledError
    if kind == "own timeout":
        raise TimeoutError("mine")
    if kind == "none":
        return None
    if kind == "nan":
        return float("nan")
    if kind == "text":
        return "1.0"
    return 1.0

async def quick(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.01)
    return 1

def works(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(60 if solution_str == "hang" else 0.25)
    return 1

class Asks:
    async def __call__(self, data_source, solution_str, ground_truth, extra_info=None, *, num_tokens):
        return num_tokens

def plain(data_source, solution_str, ground_truth, extra_info=None):
    return 10

def runs_a_loop(data_source, solution_str, ground_truth, extra_info=None):
    return asyncio.run(waits(data_source, solution_str, ground_truth))
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("async") / "functions.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def bad_rows(file: Path) -> Iterator[RewardPool]:
    with RewardPool([Term("bad_rows", f"{file}:bad_rows")], 1, 1.0) as pool:
        yield pool


def rows(*kinds: str) -> list[RewardRequest]:
    return [RewardRequest("s", kind) for kind in kinds]


def of(file: Path, name: str, **args: Any) -> Term:
    return Term(name, f"{file}:{name}", args)


def test_many_are_in_flight_and_no_more_than_allowed(file: Path):
    with RewardPool([of(file, "waits", weight=0.5)], 1, 5.0, concurrency=8) as pool:
        started = time.monotonic()
        scores = pool.score_all(rows(*["x"] * 32))
        assert time.monotonic() - started < 4
    assert [score.value for score in scores] == [0.5] * 32
    assert max(score.extra["most"] for score in scores) == 8


def test_processes_share_the_work(file: Path):
    with RewardPool([of(file, "waits")], 2, 5.0, concurrency=8) as pool:
        assert len({score.extra["pid"] for score in pool.score_all(rows(*["x"] * 8))}) == 2


def test_every_bad_row_costs_itself_alone(bad_rows: RewardPool):
    started = time.monotonic()
    scores = bad_rows.score_all(rows("right", "raise", "sleep", "exit", "none", "nan", "text", "right"))
    assert time.monotonic() - started < 10
    assert [score.value for score in scores] == [1.0, *[None] * 6, 1.0]
    assert [score.reason for score in scores[1:7]] == [
        "ValueError: bad row",
        "timed out after 1 s",
        "the reward process exited with code 1",
        "returned None",
        "returned nan",
        "returned str '1.0', not a number",
    ]
    assert bad_rows.score_all(rows("right")) == [Score("scored", 1.0)]


def test_other_ends_of_a_call(bad_rows: RewardPool):
    expected = {
        "right": "",
        "block": "timed out after 1 s",
        "stubborn": "timed out after 1 s",
        "sys.exit": "SystemExit: 3",
        "cancel": "CancelledError:",
        "own timeout": "TimeoutError: mine",
    }
    scores = bad_rows.score_all(rows(*expected))
    assert [score.reason for score in scores] == list(expected.values())


def test_a_slow_call_does_not_end_its_process(file: Path):
    with RewardPool([of(file, "waits")], 1, 0.1) as pool:
        assert [score.reason for score in pool.score_all(rows("x", "x"))] == ["timed out after 0.1 s"] * 2
        (worker,) = pool._workers
        pid = worker._process.pid
        pool.score_all(rows("x"))
        assert [worker._process.pid for worker in pool._workers] == [pid]


def test_an_object_may_be_asynchronous_and_plain_terms_stand_beside_it(file: Path):
    with RewardPool([of(file, "Asks"), of(file, "plain")], 1, 5.0) as pool:
        scores = pool.score_all([RewardRequest("s", "", num_tokens=count) for count in range(5)])
    assert [score.value for score in scores] == [10, 11, 12, 13, 14]


def test_plain_terms_that_take_their_time_do_not_cost_the_others_theirs(file: Path):
    with RewardPool([of(file, "quick"), of(file, "works")], 1, 0.7) as pool:
        assert [score.value for score in pool.score_all(rows(*["x"] * 9))] == [2.0] * 9


def test_a_plain_term_that_hangs_costs_its_own_sample(file: Path):
    with RewardPool([of(file, "works"), of(file, "quick")], 1, 1.0) as pool:
        scores = pool.score_all(rows("x", "hang", "x"))
    assert [score.reason for score in scores] == ["", "works: timed out after 1 s", ""]


def test_a_plain_function_may_run_a_loop_of_its_own(file: Path):
    with RewardPool([of(file, "runs_a_loop")], 1, 5.0) as pool:
        assert pool.score_all(rows("x"))[0].value == 1.0


def test_arguments_of_asynchronous_functions_are_checked_too(file: Path):
    with pytest.raises(UserError, match="'wieght'"):
        RewardPool([of(file, "waits", wieght=1)], 1, 5.0)
