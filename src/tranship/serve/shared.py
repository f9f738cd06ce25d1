"""An engine that a stage steps, and that clients may ask at the same time."""

from __future__ import annotations

from collections.abc import Sequence

from tranship.rollout import RolloutEngine, SamplesFailed
from tranship.rollout.around import EngineAround
from tranship.serve.desk import Desk, stopping
from tranship.types import Response, SampleId


class SharedEngine(EngineAround):
    """`RolloutEngine` for a stage: all calls go to `engine`, and each step serves the desk too.

    The stage sees its own samples alone; what clients asked for runs beside them, and takes places among them.
    """

    def __init__(self, engine: RolloutEngine, desk: Desk) -> None:
        super().__init__(engine)
        self._desk = desk

    @property
    def num_unfinished(self) -> int:
        """Samples waiting or running; clients' requests that no step has taken up yet count as one."""
        return self._engine.num_unfinished + (self._desk.has_mail and self.policy_version >= 0)

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

    def abort(self, samples: Sequence[SampleId] | None = None) -> list[Response]:
        """See `RolloutEngine.abort`. None: everything, for the stage ends; clients are told so."""
        if samples is None:
            self._desk.end(stopping())
        return self._engine.abort(samples)
