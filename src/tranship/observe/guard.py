"""A tracker whose faults are told and counted, and end no run: what it shows stands in metrics.jsonl too."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tranship.observe.trackers import Tracker, first_line

# A tracker that failed is left alone for this long, twice as long each time: its time-outs hold up training.
_FIRST_PAUSE_S = 30.0
_LONGEST_PAUSE_S = 600.0


class Tell(Protocol):
    """`Recorder.event`."""

    def __call__(self, kind: str, values: Mapping[str, Any], *, say: str = "") -> None: ...


class GuardedTracker:
    """Passes everything on to `tracker`. Its first fault is told (event `tracker_failed`), later ones are counted, and
    `close` tells how many moments are missing (event `tracker_incomplete`)."""

    def __init__(self, name: str, tracker: Tracker, tell: Tell, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._tracker = tracker
        self._tell = tell
        self._clock = clock
        self._told = False
        self._pause_s = _FIRST_PAUSE_S
        self._not_before = float("-inf")
        self.lost = 0

    def log(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Log, or count the moment as lost where the tracker fails or has failed a short while ago."""
        if self._clock() < self._not_before:
            self.lost += 1
            return
        try:
            self._tracker.log(kind, step, metrics)
        except Exception as error:
            # An observer must not end what it observes.
            self.lost += 1
            self._not_before = self._clock() + self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            self._tell_once(step, error)
        else:
            self._pause_s = _FIRST_PAUSE_S

    def close(self) -> None:
        """Close the tracker, and tell what it lost."""
        try:
            self._tracker.close()
        except Exception as error:
            self._tell_once(None, error)
        if self.lost:
            said = f"observe.trackers: {self.lost} moments of this run are missing in {self._name}"
            self._tell("tracker_incomplete", {"tracker": self._name, "lost": self.lost}, say=said)

    def _tell_once(self, step: int | None, error: Exception) -> None:
        if self._told:
            return
        self._told = True
        reason = first_line(error)
        when = "at the end" if step is None else f"at step {step}"
        said = f"observe.trackers: {self._name} failed {when} ({reason}); the run goes on, metrics.jsonl has everything"
        self._tell("tracker_failed", {"tracker": self._name, "step": step, "reason": reason}, say=said)
