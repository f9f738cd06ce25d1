"""One engine for a stage and for clients: each sees its own samples, and only theirs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tranship.models.tiny import make_tiny
from tranship.rollout import GroupRequest, RolloutEngine, SamplesFailed
from tranship.rollout.native.engine import NativeEngine
from tranship.rollout.native.folder import load_folder
from tranship.serve.desk import Desk
from tranship.serve.errors import ApiError
from tranship.serve.shared import SharedEngine
from tranship.types import Response, SampleId, Sampling

PROMPT = np.arange(5, 12, dtype=np.int32)
LIMIT_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(Path(tmp_path_factory.mktemp("model")), hidden=32, layers=1)


@pytest.fixture
def engine(folder: Path) -> RolloutEngine:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        made = NativeEngine(
            folder,
            dtype="fp32",
            device="cpu",
            max_running=6,
            max_tokens=64,
            on_update="recompute",
            deterministic=True,
            eos_token_ids=(2,),
        )
    finally:
        torch.set_num_threads(before)
    load_folder(made, folder, 0)
    return made


def stages(cap: int = 12, token: int | None = None) -> GroupRequest:
    samples = tuple(SampleId(0, number) for number in range(3))
    prompt = PROMPT if token is None else np.array([token], np.int32)
    return GroupRequest(prompt, samples, (1, 2, 3), Sampling(cap))


def within_limit(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await work()

    asyncio.run(limited())


def test_both_get_what_they_would_get_alone(engine: RolloutEngine) -> None:
    desk = Desk(engine)
    shared = SharedEngine(engine, desk)
    shared.submit(stages())
    alone: dict[SampleId, Response] = {}
    while shared.num_unfinished:
        alone |= {response.sample: response for response in shared.step()}

    async def work() -> None:
        for streamed in (False, True):
            shared.submit(stages())
            shared.step()
            ticket = desk.submit([PROMPT], 2, 9, Sampling(8), streamed=streamed)
            assert shared.num_unfinished == 4
            seen: dict[SampleId, Response] = {}
            while shared.num_unfinished:
                seen |= {response.sample: response for response in shared.step()}
            assert seen.keys() == alone.keys()
            for sample, response in seen.items():
                assert np.array_equal(response.token_ids, alone[sample].token_ids)
                assert np.array_equal(response.logprobs, alone[sample].logprobs)
            assert await ticket.next() is None
            ends = 0
            while ends < 2:
                part = await ticket.next()
                assert part is not None
                ends += part.finish_reason is not None
            assert ticket.events.empty()

    within_limit(work)


def test_each_is_told_of_its_own_failures(engine: RolloutEngine) -> None:
    desk = Desk(engine)
    shared = SharedEngine(engine, desk)
    engine.storage("embed")[[13, 14]] = float("nan")

    async def work() -> None:
        for bad, good in ((13, None), (None, 14)):
            shared.submit(stages(cap=3, token=good))
            prompt = PROMPT if bad is None else np.array([bad], np.int32)
            ticket = desk.submit([prompt], 1, 9, Sampling(3), streamed=False)
            finished: list[Response] = []
            failed: list[SampleId] = []
            while shared.num_unfinished:
                try:
                    finished += shared.step()
                except SamplesFailed as error:
                    failed += error.samples
            assert len(finished) == (3 if good is None else 0)
            assert len(failed) == (0 if good is None else 3)
            assert await ticket.next() is None
            if bad is None:
                assert (await ticket.next()) is not None
            else:
                with pytest.raises(ApiError, match="not finite"):
                    await ticket.next()

    within_limit(work)


def test_clients_wait_for_the_first_weights_and_hear_of_the_end(folder: Path, engine: RolloutEngine) -> None:
    engine.sleep()
    engine.wake_up()
    desk = Desk(engine)
    shared = SharedEngine(engine, desk)

    async def work() -> None:
        ticket = desk.submit([PROMPT], 1, 9, Sampling(50), streamed=False)
        assert shared.num_unfinished == 0
        load_folder(shared, folder, 3)
        assert shared.num_unfinished == 1
        shared.step()
        assert await ticket.next() is None
        shared.submit(stages())
        assert len(shared.abort()) == 3
        with pytest.raises(ApiError, match="stopping"):
            await ticket.next()
        assert shared.num_unfinished == 0

    within_limit(work)
