"""An engine in a thread of its own, for a desk alone: only that thread touches the engine.

A fault of the engine ends all that runs and is said on standard error; the next request finds it working again, or is
told that it is not.
"""

from __future__ import annotations

import sys
import threading
import traceback

from tranship.rollout import RolloutEngine, SamplesFailed
from tranship.serve.desk import Desk, broken, stopping

_JOIN_S = 30.0
_WAIT_S = 1.0


class Runner:
    """Steps an engine as long as its desk has something for it."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.desk = Desk(engine)
        self._engine = engine
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def working(self) -> bool:
        """Whether the thread goes on; a fault of one step does not end it."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the thread. Whatever runs is stopped."""
        self._closing = True
        self.desk.refuse()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        try:
            while not self._closing:
                self.desk.take_up(0.0 if self.desk.num_unfinished else _WAIT_S)
                if self.desk.num_unfinished:
                    self._step()
            self.desk.end(stopping())
            self.desk.close(stopping())
        except BaseException as error:
            traceback.print_exc(file=sys.stderr)
            self.desk.close(broken(error))

    def _step(self) -> None:
        try:
            self.desk.hand_out(self._engine.step())
        except SamplesFailed as error:
            self.desk.failed(error)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self.desk.fail_all(broken(error))
