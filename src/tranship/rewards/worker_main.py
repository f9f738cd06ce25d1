"""A process that runs the functions of a reward. `RewardPool` starts it; frames go over its pipes.

It gets {terms, sys_path, parent, memory_bytes, timeout_s, concurrency} and answers {ready: True, in_flight} or
{error: text}. Then it gets {id, row} and answers {id, status, value, raw, reason, extra}, and before that {id, at: the
number of the term that begins, or null while it waits for its turn}, until its input ends.

Functions run one row at a time, with nothing around them, unless one of them is asynchronous: then up to `concurrency`
rows are in flight in one event loop. Plain functions run there too, one at a time, between the waits of the others.
"""

from __future__ import annotations

import asyncio
import ctypes
import io
import os
import resource
import signal
import sys
import traceback
from collections.abc import Coroutine
from typing import Any

from tranship.ipc import FrameReader, pack
from tranship.rewards.calls import Call, Row, load
from tranship.rewards.scoring import NOT_APPLICABLE, invalid, to_message, to_score
from tranship.rewards.terms import Term, combine
from tranship.types import Score, UserError

_PR_SET_PDEATHSIG = 1
_MAX_TRACEBACKS = 3
_CHUNK = 1 << 16


def main() -> None:
    """Serve until the input ends."""
    reader, answers = _take_pipes()
    frames = FrameReader()
    messages: list[Any] = []
    while not messages:
        data = os.read(reader, _CHUNK)
        if not data:
            return
        messages += frames.feed(data)
    worker, answer = _start(messages.pop(0), answers)
    try:
        _write(answers, pack(answer))
        if worker is not None:
            worker.serve(reader, frames, messages)
    except BrokenPipeError:
        return


class _Expired(Exception):
    """An asynchronous call took longer than its limit."""


class _Worker:
    def __init__(self, terms: list[Term], calls: list[Call], timeout_s: float, answers: int) -> None:
        self.is_async = any(call.is_async for call in calls)
        self._terms = terms
        self._calls = calls
        self._timeout_s = timeout_s
        self._answers = answers
        self._num_invalid = 0
        self._running: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()

    def serve(self, reader: int, frames: FrameReader, messages: list[Any]) -> None:
        if self.is_async:
            asyncio.run(self._serve_async(reader, frames, messages))
            return
        for message in messages:
            _run_plain(self._answer(message))
        while data := os.read(reader, _CHUNK):
            for message in frames.feed(data):
                _run_plain(self._answer(message))

    async def _serve_async(self, reader: int, frames: FrameReader, messages: list[Any]) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def read() -> None:
            data = os.read(reader, _CHUNK)
            if not data:
                loop.remove_reader(reader)
                ended.set()
            for message in frames.feed(data):
                self._begin(message)

        for message in messages:
            self._begin(message)
        loop.add_reader(reader, read)
        await ended.wait()
        while self._running:
            await asyncio.wait(self._running)

    def _begin(self, message: dict[str, Any]) -> None:
        task = asyncio.get_running_loop().create_task(self._answer(message))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _answer(self, message: dict[str, Any]) -> None:
        scores: list[Score | None] = []
        for index, call in enumerate(self._calls):
            if self.is_async and not call.is_async:
                self._say_where(message, None)
                async with self._turn:
                    self._say_where(message, index)
                    score = await self._score(call, message["row"])
            else:
                if index:
                    self._say_where(message, index)
                score = await self._score(call, message["row"])
            scores.append(score)
            if score is not None and score.status != "scored":
                break
        _write(self._answers, pack({"id": message["id"], **to_message(combine(self._terms, scores))}))

    def _say_where(self, message: dict[str, Any], term: int | None) -> None:
        _write(self._answers, pack({"id": message["id"], "at": term}))

    async def _score(self, call: Call, row: Row) -> Score | None:
        try:
            result = await self._awaited(call, row) if call.is_async else call.run(row)
            score = None if result is NOT_APPLICABLE else to_score(result)
        except _Expired:
            score = invalid(f"timed out after {self._timeout_s:g} s")
        except BaseException as error:  # SystemExit too: whatever ends a call ends only this sample.
            if self._num_invalid < _MAX_TRACEBACKS:
                traceback.print_exc()
            score = invalid(f"{type(error).__name__}: {error}")
        self._num_invalid += score is not None and score.status == "invalid"
        return score

    async def _awaited(self, call: Call, row: Row) -> Any:
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await call.run(row)
        except TimeoutError:
            if limit.expired():
                raise _Expired from None
            raise


def _run_plain(answer: Coroutine[Any, Any, None]) -> None:
    """Run to its end what awaits nothing. There is no event loop, so that functions may run one of their own."""
    try:
        answer.send(None)
    except StopIteration:
        return
    raise AssertionError("a plain function was awaited")


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


def _start(setup: dict[str, Any], answers: int) -> tuple[_Worker | None, dict[str, Any]]:
    _die_with(setup["parent"])
    sys.path[:] = setup["sys_path"]
    _limit_memory(setup["memory_bytes"])
    terms = [Term(**term) for term in setup["terms"]]
    calls = []
    for term in terms:
        try:
            calls.append(load(term.function, term.args, term.setting))
        except UserError as error:
            return None, {"error": str(error) + _about_memory(error, setup["memory_bytes"])}
        except BaseException as error:
            text = f"{term.setting}: {term.function} failed: {type(error).__name__}: {error}"
            return None, {"error": " ".join(text.split()) + _about_memory(error, setup["memory_bytes"])}
    worker = _Worker(terms, calls, setup["timeout_s"], answers)
    return worker, {"ready": True, "in_flight": setup["concurrency"] if worker.is_async else 1}


def _limit_memory(memory_bytes: int | None) -> None:
    if memory_bytes is not None and sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, hard))


def _about_memory(error: BaseException, memory_bytes: int | None) -> str:
    """What to do, where the limit of memory may be why something does not import; else nothing."""
    text = f"{type(error).__name__} {error}".lower()
    if memory_bytes is None or not any(word in text for word in ("memory", "map segment")):
        return ""
    return f" (reward.memory_mb allows {memory_bytes >> 20} MiB of address space: raise it, or null for no limit)"


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
