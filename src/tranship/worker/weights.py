"""From the trainer's weights to the sampler's, one version at a time: plan, move, verify, probe, admit (I3).

The same pieces, plan and checks serve both placements. Where trainer and sampler share a process, buckets go straight
from storage to storage; else the trainer publishes immutable, versioned buckets, and a sampler fetches them when it is
ready for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tranship.layouts import Layout, Piece
from tranship.reshard import Announcement, Plan, WeightSink, WeightSource, check_probe, make_plan
from tranship.rollout import RolloutEngine
from tranship.stages import Stopwatch
from tranship.train import TrainEngine

FETCH_S = 120.0
_BUCKET_BYTES = 16 << 20


@dataclass(frozen=True)
class Probe:
    """A short sequence on which trainer and sampler must give the same log-probs, within the rounding of `dtype`."""

    token_ids: tuple[int, ...]
    temperature: float
    dtype: str

    def of_trainer(self, engine: TrainEngine) -> np.ndarray:
        """float32 [L - 1]: the trainer's log-probs of tokens 1.. ."""
        ids = np.array(self.token_ids, dtype=np.int32)
        return engine.logprobs([ids[:1]], np.zeros(1, dtype=np.int64), [ids[1:]])[0]

    def check(self, version: int, trainer: np.ndarray, engine: RolloutEngine) -> None:
        """RunError if the sampler's weights do not give the trainer's log-probs."""
        sampler = engine.probe(np.array(self.token_ids, dtype=np.int32), self.temperature)
        check_probe(version, trainer, sampler, self.dtype)


@dataclass(frozen=True)
class WeightsReady:
    """What a sampler needs to fetch a version: where its buckets are, and what the trainer's probe gave."""

    announcement: Announcement
    probe_logprobs: np.ndarray


def plan_weights(source: Sequence[Piece], targets: Sequence[Sequence[Piece]]) -> Plan:
    """The moves from one training rank to the ranks of a sampler; every side that computes it gets the same."""
    target = Layout(tuple(tuple(pieces) for pieces in targets))
    return make_plan(Layout((tuple(source),)), target, bucket_bytes=_BUCKET_BYTES)


class LocalWeights:
    """Trainer and sampler in one process."""

    def __init__(self, trainer: TrainEngine, sampler: RolloutEngine, probe: Probe, watch: Stopwatch) -> None:
        self._trainer = trainer
        self._sampler = sampler
        self._probe = probe
        self._watch = watch
        self._source = WeightSource(plan_weights(trainer.pieces(), [sampler.pieces()]), trainer.storage)

    def publish(self, version: int) -> None:
        """The sampler uses the trainer's weights as `version` when this returns."""
        with self._watch.time("reshard"):
            expected = self._probe.of_trainer(self._trainer)
            self._sampler.begin_update()
            self._source.push(version, self._sampler.storage)
            self._sampler.finish_update(version)
            self._probe.check(version, expected, self._sampler)


class PublishedWeights:
    """The trainer's end of a split placement."""

    def __init__(
        self,
        trainer: TrainEngine,
        plan: Plan,
        probe: Probe,
        put: Callable[[np.ndarray], Any],
        watch: Stopwatch,
    ) -> None:
        self._trainer = trainer
        self._probe = probe
        self._put = put
        self._watch = watch
        self._source = WeightSource(plan, trainer.storage)

    def publish(self, version: int) -> WeightsReady:
        """Immutable buckets of the weights as they are now, under `version`."""
        with self._watch.time("reshard"):
            expected = self._probe.of_trainer(self._trainer)
            return WeightsReady(self._source.publish(version, self._put), expected)


class FetchedWeights:
    """A sampler's end of a split placement. tell: called with the number of the version before it is fetched; a
    sampler of several ranks has the others fetch theirs."""

    def __init__(
        self,
        sampler: RolloutEngine,
        plan: Plan,
        probe: Probe,
        get: Callable[[Any, float], np.ndarray],
        watch: Stopwatch,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self._sampler = sampler
        self._probe = probe
        self._get = get
        self._watch = watch
        self._tell = tell
        self._sink = WeightSink(plan, sampler.storage)
        self._ready: WeightsReady | None = None

    def announce(self, ready: WeightsReady) -> None:
        """A newer version can be fetched; one that was announced and not fetched yet is skipped."""
        if self._ready is None or ready.announcement.version > self._ready.announcement.version:
            self._ready = ready

    def update(self) -> bool:
        """Fetch, verify, probe and use the announced version, if there is one; returns whether there was."""
        if self._ready is None or self._ready.announcement.version <= self._sampler.policy_version:
            return False
        ready, self._ready = self._ready, None
        with self._watch.time("reshard"):
            self._sampler.begin_update()
            if self._tell is not None:
                self._tell(str(ready.announcement.version))
            version = self._sink.pull([ready.announcement], lambda ref: self._get(ref, FETCH_S))
            self._sampler.finish_update(version)
            self._probe.check(version, ready.probe_logprobs, self._sampler)
        return True
