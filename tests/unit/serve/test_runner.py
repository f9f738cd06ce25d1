"""The engine's thread: requests in, parts out; each request fails alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest

from tranship.rollout import GroupRequest, RolloutEngine, SamplesFailed
from tranship.serve.desk import Part, Ticket
from tranship.serve.errors import ApiError
from tranship.serve.runner import Runner
from tranship.types import Response, SampleId, Sampling, UserError, sample_seed

NAN, CRASH, REFUSED = 66, 77, 88


class CountingEngine:
    """Every sample writes 0, 1, 2, ... to its cap, a token a step. A prompt that holds NAN, CRASH or REFUSED fails."""

    policy_version = 4

    def __init__(self) -> None:
        self.running: dict[SampleId, tuple[GroupRequest, int]] = {}
        self.aborted: list[SampleId] = []
        self.seeds: dict[SampleId, int] = {}

    @property
    def num_unfinished(self) -> int:
        return len(self.running)

    def submit(self, request: GroupRequest) -> None:
        if REFUSED in request.prompt_ids:
            raise UserError("it does not fit")
        self.seeds |= dict(zip(request.samples, request.seeds, strict=True))
        self.running |= dict.fromkeys(request.samples, (request, 0))

    def step(self) -> list[Response]:
        time.sleep(0.001)
        for word, error in ((NAN, SamplesFailed), (CRASH, None)):
            hit = [sample for sample, (request, _) in self.running.items() if word in request.prompt_ids]
            if hit and error is not None:
                for sample in hit:
                    del self.running[sample]
                raise error("not finite", hit)
            if hit:
                raise ZeroDivisionError("a bug")
        self.running = {sample: (request, made + 1) for sample, (request, made) in self.running.items()}
        ended = [s for s, (request, made) in self.running.items() if made >= request.sampling.max_response_tokens]
        return [self._response(sample, self.running.pop(sample)[1], 0, "length") for sample in ended]

    def peek(self, starts: Mapping[SampleId, int]) -> list[Response]:
        return [
            self._response(sample, made, starts[sample], "abort")
            for sample, (_, made) in self.running.items()
            if sample in starts and made > starts[sample]
        ]

    def abort(self, samples: Sequence[SampleId] | None = None) -> list[Response]:
        chosen = [sample for sample in (samples or list(self.running)) if sample in self.running]
        self.aborted += chosen
        return [self._response(sample, self.running.pop(sample)[1], 0, "abort") for sample in chosen]

    def _response(self, sample: SampleId, made: int, start: int, reason: Any) -> Response:
        ids = np.arange(start, made, dtype=np.int32)
        return Response(sample, ids, ids.astype(np.float32), np.full(len(ids), 4, np.int32), reason)


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine()


@pytest.fixture
def runner(engine: CountingEngine) -> Iterator[Runner]:
    made = Runner(cast(RolloutEngine, engine))
    yield made
    made.close()
    assert not made.working


def ask(runner: Runner, cap: int, *words: int, n: int = 1, streamed: bool = False, prompts: int = 1) -> Ticket:
    prompt = np.array([1, *words], np.int32)
    return runner.desk.submit([prompt] * prompts, n, 5, Sampling(cap), streamed=streamed)


async def parts_of(ticket: Ticket, num: int) -> list[Part]:
    """All parts until `num` samples have ended."""
    found: list[Part] = []
    assert await ticket.next() is None, "the engine says first that it has taken a request"
    while sum(part.finish_reason is not None for part in found) < num:
        part = await ticket.next()
        assert part is not None
        found.append(part)
    return found


def within(seconds: float, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(seconds):
            await work()

    asyncio.run(limited())


def test_whole_and_streamed_parts(runner: Runner, engine: CountingEngine) -> None:
    async def work() -> None:
        whole, streamed = ask(runner, 6, n=2, prompts=2), ask(runner, 6, n=2, streamed=True)
        ended = await parts_of(whole, 4)
        assert sorted(part.index for part in ended) == [0, 1, 2, 3]
        assert all(part.token_ids.tolist() == list(range(6)) for part in ended)
        assert all(part.finish_reason == "length" for part in ended)
        parts = await parts_of(streamed, 2)
        assert len(parts) == 12
        for index in range(2):
            its = [part for part in parts if part.index == index]
            assert np.concatenate([part.token_ids for part in its]).tolist() == list(range(6))
            assert np.concatenate([part.logprobs for part in its]).tolist() == list(range(6))
        assert [sample_seed(5, SampleId(place, number)) for place in range(2) for number in range(2)] == [
            engine.seeds[sample] for sample in whole.index
        ]
        assert [engine.seeds[sample] for sample in streamed.index] == [sample_seed(5, SampleId(0, n)) for n in range(2)]
        assert runner.desk.num_unfinished == 0

    within(20, work)


def test_a_request_that_fails_fails_alone(runner: Runner, engine: CountingEngine) -> None:
    async def work() -> None:
        good = ask(runner, 300)
        with pytest.raises(ApiError, match="it does not fit") as refused:
            await ask(runner, 3, REFUSED).next()
        assert refused.value.status == 400
        mixed = runner.desk.submit(
            [np.array([1], np.int32), np.array([NAN], np.int32)], 1, 0, Sampling(10_000), streamed=False
        )
        assert await mixed.next() is None
        with pytest.raises(ApiError, match="not finite") as failed:
            await mixed.next()
        assert failed.value.status == 500
        assert set(engine.aborted) == {sample for sample in mixed.index if mixed.index[sample] == 0}
        assert len(await parts_of(good, 1)) == 1

    within(20, work)


def test_part_of_a_request_is_not_left_running(runner: Runner, engine: CountingEngine) -> None:
    async def work() -> None:
        half = runner.desk.submit(
            [np.array([1], np.int32), np.array([REFUSED], np.int32)], 2, 0, Sampling(9999), streamed=True
        )
        with pytest.raises(ApiError, match="it does not fit"):
            await half.next()
        assert runner.desk.num_unfinished == 0
        assert len(engine.aborted) == 2

    within(20, work)


def test_a_bug_ends_what_runs_and_the_next_request_works(runner: Runner, capfd: pytest.CaptureFixture[str]) -> None:
    async def work() -> None:
        good, bad = ask(runner, 100_000), ask(runner, 3, CRASH)
        for ticket in (good, bad):
            assert await ticket.next() is None
            with pytest.raises(ApiError, match="ZeroDivisionError: a bug"):
                await ticket.next()
        assert runner.desk.alive
        assert len(await parts_of(ask(runner, 2), 1)) == 1

    within(20, work)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_cancel_stops_the_samples(runner: Runner, engine: CountingEngine) -> None:
    async def work() -> None:
        ticket = ask(runner, 100_000, n=3)
        assert await ticket.next() is None
        runner.desk.cancel(ticket)
        runner.desk.cancel(ticket)
        while runner.desk.num_unfinished:
            await asyncio.sleep(0.01)
        assert sorted(engine.aborted) == sorted(ticket.index)
        assert len(await parts_of(ask(runner, 2), 1)) == 1

    within(20, work)


def test_a_server_that_stops_says_so(runner: Runner) -> None:
    async def work() -> None:
        running = ask(runner, 100_000)
        assert await running.next() is None
        runner.desk.refuse()
        for ticket in (running, ask(runner, 2)):
            with pytest.raises(ApiError, match="stopping") as refused:
                await ticket.next()
            assert refused.value.status == 503
        assert not runner.desk.alive
        runner.close()
        with pytest.raises(ApiError, match="stopping"):
            await ask(runner, 2).next()

    within(20, work)


def test_a_thread_that_ends_fails_everything(
    runner: Runner, engine: CountingEngine, capfd: pytest.CaptureFixture[str]
) -> None:
    async def work() -> None:
        engine.abort = None  # type: ignore[method-assign, assignment]
        bad = ask(runner, 3, CRASH)
        assert await bad.next() is None
        with pytest.raises(ApiError, match="the engine failed"):
            await bad.next()
        while runner.working:
            await asyncio.sleep(0.01)
        assert not runner.desk.alive
        with pytest.raises(ApiError, match="the engine failed"):
            await ask(runner, 2).next()

    within(20, work)
    assert "not callable" in capfd.readouterr().err
