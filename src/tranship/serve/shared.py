"""An engine that a stage steps, and that clients may ask at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from tranship.layouts.pieces import Piece
from tranship.rollout import GroupRequest, RolloutEngine, SamplesFailed
from tranship.serve.desk import Desk, stopping
from tranship.types import Response, SampleId


class SharedEngine:
    """`RolloutEngine` for a stage: all calls go to `engine`, and each step serves the desk too.

    The stage sees its own samples alone; what clients asked for runs beside them, and takes places among them.
    """

    def __init__(self, engine: RolloutEngine, desk: Desk) -> None:
        self._engine = engine
        self._desk = desk
        self.capabilities = engine.capabilities

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

    @property
    def num_unfinished(self) -> int:
        """Samples waiting or running; clients' requests that no step has taken up yet count as one."""
        return self._engine.num_unfinished + (self._desk.has_mail and self.policy_version >= 0)

    @property
    def num_free(self) -> int:
        return self._engine.num_free

    def submit(self, request: GroupRequest) -> None:
        self._engine.submit(request)

    def step(self) -> list[Response]:
        """See `RolloutEngine.step`; what it returns and raises is about the stage's samples."""
        if self.policy_version >= 0:
            self._desk.take_up()
        try:
            return self._desk.hand_out(self._engine.step())
        except SamplesFailed as error:
            others = self._desk.failed(error)
            if others:
                raise SamplesFailed(str(error), others) from error
            return []

    def peek(self, starts: Mapping[SampleId, int]) -> list[Response]:
        return self._engine.peek(starts)

    def abort(self, samples: Sequence[SampleId] | None = None) -> list[Response]:
        """See `RolloutEngine.abort`. None: everything, for the stage ends; clients are told so."""
        if samples is None:
            self._desk.end(stopping())
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
