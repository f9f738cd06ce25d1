"""An engine around another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from tranship.layouts.pieces import Piece
from tranship.rollout.engine import GroupRequest, RolloutEngine
from tranship.types import Response, SampleId


class EngineAround:
    """`RolloutEngine` that leaves everything to `engine`; who builds on it says what is otherwise."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self.capabilities = engine.capabilities

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @property
    def num_unfinished(self) -> int:
        return self._engine.num_unfinished

    @property
    def num_free(self) -> int:
        return self._engine.num_free

    def submit(self, request: GroupRequest) -> None:
        self._engine.submit(request)

    def step(self) -> list[Response]:
        return self._engine.step()

    def peek(self, starts: Mapping[SampleId, int]) -> list[Response]:
        return self._engine.peek(starts)

    def abort(self, samples: Sequence[SampleId] | None = None) -> list[Response]:
        return self._engine.abort(samples)

    def pieces(self) -> list[Piece]:
        return self._engine.pieces()

    def storage(self, name: str) -> torch.Tensor:
        return self._engine.storage(name)

    def begin_update(self) -> None:
        self._engine.begin_update()

    def finish_update(self, policy_version: int) -> None:
        self._engine.finish_update(policy_version)

    def probe(self, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        return self._engine.probe(token_ids, temperature)

    def sleep(self) -> None:
        self._engine.sleep()

    def wake_up(self) -> None:
        self._engine.wake_up()
