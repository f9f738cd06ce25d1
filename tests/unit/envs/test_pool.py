"""Sessions are apart from each other and from us: whatever one does costs its own sample, and nothing is left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tranship.envs import Answer, EnvPool, describe_env
from tranship.types import RunError, UserError

WORLDS = Path(__file__).parent / "worlds.py"
OBEDIENT = f"{WORLDS}:Obedient"
INFO = {"text": "hello"}


def descendants(pid: int) -> set[int]:
    """All processes below `pid`."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found |= {child} | descendants(child)
    return found


def await_that(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def answers(pool: EnvPool, count: int) -> dict[int, Answer]:
    found: dict[int, Answer] = {}
    deadline = time.monotonic() + 20
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} answers came"
        pool.wait(1.0)
        found.update(pool.poll())
    return found


def say(pool: EnvPool, session: int, order: str) -> Answer:
    pool.step(session, {"role": "assistant", "content": order, "finish_reason": "stop"})
    return answers(pool, 1)[session]


@pytest.fixture(scope="module")
def shared_pool() -> Iterator[EnvPool]:
    with EnvPool(OBEDIENT, num_workers=4, step_timeout_s=1.0, memory_bytes=1 << 28) as pool:
        yield pool


@pytest.fixture
def pool(shared_pool: EnvPool) -> EnvPool:
    shared_pool.poll()
    assert shared_pool.num_pending == 0
    return shared_pool


def opened(pool: EnvPool, **info: Any) -> int:
    session = pool.open({**INFO, **info}, 5)
    assert answers(pool, 1)[session].error is None
    return session


def test_a_session_answers_and_keeps_its_own_state(pool: EnvPool) -> None:
    first, second = pool.open(INFO, 5), pool.open(INFO, 6)
    begun = answers(pool, 2)
    assert begun[first].messages[0]["content"].startswith("hello 5 ")
    assert begun[second].messages[0]["content"].startswith("hello 6 ")
    assert [say(pool, first, "count").messages[0]["content"] for _ in range(3)] == ["1", "2", "3"]
    answer = say(pool, second, "count")
    assert (answer.messages, answer.reward, answer.done, answer.info) == (
        [{"role": "user", "content": "1"}],
        0.5,
        False,
        {"turns": 1},
    )
    last = say(pool, second, "enough")
    assert (last.reward, last.done, last.error) == (1.0, True, None)
    for session in (first, second):
        pool.end(session)


def test_the_randomness_of_a_session_is_its_seeds(pool: EnvPool) -> None:
    sessions = [pool.open(INFO, seed) for seed in (5, 5, 6)]
    said = answers(pool, 3)
    a, b, c = (said[session].messages[0]["content"] for session in sessions)
    assert a == b
    assert a.split()[2] != c.split()[2]
    for session in sessions:
        pool.end(session)


@pytest.mark.parametrize(
    ("order", "reason"),
    [
        ("raise", "ValueError: as asked"),
        ("exit", "SystemExit: 3"),
        ("die", "the session's process exited with code 7"),
        ("sleep", "timed out after 1 s"),
        ("stop", "timed out after 1 s"),
        ("allocate", "MemoryError"),
        ("close", "the session's process was killed by signal SIGKILL"),
        ("object", "a object is not a JSON value"),
        ("nan", "the reward, a float, is no finite number"),
        ("deep", "the session wrote something else than an answer"),
        ("number", "messages have to be dicts"),
        ("system", "messages have to be dicts"),
    ],
)
def test_what_a_session_does_costs_only_its_own_sample(pool: EnvPool, order: str, reason: str) -> None:
    bad, good = opened(pool), opened(pool)
    start = time.monotonic()
    answer = say(pool, bad, order)
    assert reason in (answer.error or "")
    assert time.monotonic() - start < 8
    assert say(pool, good, "count").messages[0]["content"] == "1"
    pool.end(bad)
    pool.end(good)


def test_a_session_that_failed_says_so_again(pool: EnvPool) -> None:
    session = opened(pool)
    assert say(pool, session, "die").error
    assert "exited with code 7" in (say(pool, session, "count").error or "")
    pool.end(session)


def test_a_failed_reset_has_its_reason(pool: EnvPool) -> None:
    session = pool.open({"fault": "no such task"}, 1)
    assert answers(pool, 1)[session].error == "RuntimeError: no such task"
    pool.end(session)


def test_messages_may_be_large(pool: EnvPool) -> None:
    session = pool.open({"text": "y" * (1 << 21)}, 1)
    assert len(answers(pool, 1)[session].messages[0]["content"]) > 1 << 21
    assert len(say(pool, session, "large").messages[0]["content"]) == 1 << 21
    pool.end(session)


def test_an_ended_session_is_not_answered_and_leaves_no_process(pool: EnvPool) -> None:
    before = descendants(os.getpid())
    session = opened(pool)
    pool.step(session, {"role": "assistant", "content": "sleep", "finish_reason": "stop"})
    time.sleep(0.1)
    assert len(descendants(os.getpid()) - before) == 1
    pool.end(session)
    pool.end(session)
    assert await_that(lambda: descendants(os.getpid()) <= before, 5)
    assert pool.num_pending == 0
    assert not pool.wait(0.1)


def test_what_a_session_started_ends_with_it(pool: EnvPool) -> None:
    before = descendants(os.getpid())
    session = opened(pool)
    say(pool, session, "fork")
    assert len(descendants(os.getpid()) - before) == 3
    pool.end(session)
    assert await_that(lambda: descendants(os.getpid()) <= before, 5)


def test_no_more_requests_run_at_once_than_there_are_workers() -> None:
    with EnvPool(OBEDIENT, num_workers=1, step_timeout_s=0.5) as pool:
        slow, quick = opened(pool), opened(pool)
        for session, order in ((slow, "sleep"), (quick, "count")):
            pool.step(session, {"role": "assistant", "content": order, "finish_reason": "stop"})
        found = answers(pool, 2)
        assert "timed out" in (found[slow].error or "")
        assert found[quick].error is None


def test_the_process_that_starts_sessions_can_be_lost() -> None:
    with EnvPool(OBEDIENT, num_workers=2, step_timeout_s=5.0) as pool:
        bad, good = opened(pool), opened(pool)
        assert "the process that starts the sessions ended" in (say(pool, bad, "regicide").error or "")
        assert say(pool, good, "count").error
        again = opened(pool)
        assert say(pool, again, "count").messages[0]["content"] == "1"
        for _ in range(2):
            assert say(pool, opened(pool), "regicide").error
        third = pool.open(INFO, 1)
        assert answers(pool, 1)[third].error is None, "an answer in between ends the row of deaths"


def test_a_pool_whose_zygote_dies_again_and_again_stops_the_run() -> None:
    with EnvPool(OBEDIENT) as pool:
        for _ in range(3):
            zygote = pool._zygote
            assert zygote is not None
            os.kill(zygote._process.pid, signal.SIGKILL)
            assert await_that(lambda old=zygote: pool._zygote is not old or pool._box.fault is not None)
            assert await_that(lambda: pool._box.fault is not None or bool(pool._zygote and pool._zygote.description))
        with pytest.raises(RunError, match="3 times in a row"):
            pool.poll()


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("nothing", {}, "env.name: 'nothing' is not known"),
        (f"{WORLDS}:Refused", {}, "this world has to be given a key"),
        (f"{WORLDS}:Broken", {}, "KeyError: 'oops'"),
        (f"{WORLDS}:Half", {}, "has no method step"),
        (f"{WORLDS}:THIS", {}, "not a class or function"),
        (f"{WORLDS}:Deadly", {}, "ended while it was made"),
        (OBEDIENT, {"colour": "red"}, "does not take env.args"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused_at_start(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EnvPool(name, args, log_file=Path(os.devnull))


def test_an_environment_that_is_not_made_in_time_is_refused() -> None:
    before = descendants(os.getpid())
    with pytest.raises(UserError, match=r"was not made in 0\.5 s"):
        EnvPool(f"{WORLDS}:Slow", start_timeout_s=0.5)
    assert descendants(os.getpid()) <= before


def test_what_is_printed_goes_to_the_log_and_answers_set_the_wakeup(tmp_path: Path) -> None:
    wakeup = threading.Event()
    with EnvPool(OBEDIENT, wakeup=wakeup, log_file=tmp_path / "env.log") as pool:
        session = opened(pool)
        wakeup.clear()
        pool.step(session, {"role": "assistant", "content": "print", "finish_reason": "stop"})
        assert wakeup.wait(5)
        pool.poll()
    assert "said to standard output" in (tmp_path / "env.log").read_text()


def test_close_leaves_no_process() -> None:
    before = descendants(os.getpid())
    pool = EnvPool(OBEDIENT, num_workers=4, step_timeout_s=60)
    busy, idle = opened(pool), opened(pool)
    say(pool, idle, "fork")
    pool.step(busy, {"role": "assistant", "content": "sleep", "finish_reason": "stop"})
    time.sleep(0.1)
    pool.close()
    pool.close()
    assert await_that(lambda: descendants(os.getpid()) <= before, 5)


def test_sessions_die_with_their_parent(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom tranship.envs import EnvPool\n"
        f"pool = EnvPool({OBEDIENT!r}, {{'folder': {str(tmp_path)!r}}}, step_timeout_s=60)\n"
        "session = pool.open({'text': 'x'}, 1)\npool.wait(20)\npool.poll()\n"
        "pool.step(session, {'role': 'assistant', 'content': 'sleep', 'finish_reason': 'stop'})\n"
        "time.sleep(0.2)\nprint('up', flush=True)\ntime.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        below = descendants(parent.pid)
        assert {int(file.name) for file in tmp_path.iterdir()} <= below
        assert len(below) == 2
        parent.kill()
    assert await_that(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), 5)


def test_an_environment_is_described() -> None:
    spec = describe_env("calculator")
    assert spec.roles == ("tool",)
    assert [tool["function"]["name"] for tool in spec.tools] == ["calculate"]
