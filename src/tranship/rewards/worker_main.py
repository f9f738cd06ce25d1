"""A process that runs one reward function, one call at a time. `RewardPool` starts it; frames go over its pipes.

It gets {function, args, sys_path, parent, memory_bytes}, answers {ready: True} or {error: text}, then gets
{data_source, solution_str, ground_truth, extra_info} and answers {status, value, reason, extra} until its input ends.
"""

from __future__ import annotations

import ctypes
import inspect
import io
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from tranship.lookup import resolve
from tranship.rewards.frames import FrameReader, pack
from tranship.rewards.scoring import invalid, to_score
from tranship.rewards.table import REWARDS
from tranship.types import Score, UserError

_PR_SET_PDEATHSIG = 1
_MAX_TRACEBACKS = 3
_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")

Call = Callable[[dict[str, Any]], Any]


def main() -> None:
    """Serve until the input ends."""
    reader, answers = _take_pipes()
    frames = FrameReader()
    call: Call | None = None
    num_invalid = 0
    while data := os.read(reader, 1 << 16):
        for message in frames.feed(data):
            if call is None:
                call, answer = _start(message)
            else:
                score = _score(call, message, show_traceback=num_invalid < _MAX_TRACEBACKS)
                num_invalid += score.status == "invalid"
                answer = _to_message(score)
            try:
                _write(answers, pack(answer))
            except BrokenPipeError:
                return
            if call is None:
                return


def _take_pipes() -> tuple[int, int]:
    """The pipes of the pool, moved away from 0 and 1, so that neither print nor input() reaches them."""
    reader, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)
    return reader, answers


def _start(setup: dict[str, Any]) -> tuple[Call | None, dict[str, Any]]:
    _die_with(setup["parent"])
    sys.path[:] = setup["sys_path"]
    if setup["memory_bytes"] is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (setup["memory_bytes"], hard))
    try:
        return load(setup["function"], setup["args"]), {"ready": True}
    except UserError as error:
        return None, {"error": str(error)}
    except BaseException as error:
        return None, {"error": f"reward.function: {setup['function']} failed: {type(error).__name__}: {error}"}


def load(name: str, args: dict[str, Any]) -> Call:
    """The function `name` as a call of one row. Raises UserError where it cannot be called as verl calls it."""
    function = resolve(name, REWARDS, "reward.function")
    if not callable(function):
        raise UserError(f"reward.function: {name} is a {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function):
        raise UserError(f"reward.function: {name} is asynchronous: give a plain function")
    signature = inspect.signature(function)
    try:
        signature.bind(**dict.fromkeys(_NAMES), **args)
        return lambda row: function(**row, **args)
    except TypeError as error:
        by_name = error
    try:
        signature.bind(*_NAMES, **args)
        return lambda row: function(*(row[key] for key in _NAMES), **args)
    except TypeError:
        raise UserError(
            f"reward.function: {name}{signature} cannot be called with ({', '.join(_NAMES)}) and reward.args "
            f"{args or '{}'}: {by_name}"
        ) from by_name


def _score(call: Call, row: dict[str, Any], show_traceback: bool) -> Score:
    try:
        return to_score(call(row))
    except BaseException as error:  # SystemExit too: whatever ends a call ends only this sample.
        if show_traceback:
            traceback.print_exc()
        return invalid(f"{type(error).__name__}: {error}")


def _to_message(score: Score) -> dict[str, Any]:
    return {"status": score.status, "value": score.value, "reason": score.reason, "extra": score.extra}


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, even in the middle of C code (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


if __name__ == "__main__":
    main()
