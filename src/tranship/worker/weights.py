"""From the trainer's weights to the sampler's, one version at a time: plan, move, verify, probe, admit (I3).

The same pieces, plan and checks serve both placements. Where trainer and sampler share a process, buckets go straight
from storage to storage; else the trainer publishes immutable, versioned buckets, and a sampler fetches them when it is
ready for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tranship.reshard import Announcement, WeightSink, WeightSource, check_probe
from tranship.rollout import RolloutEngine
from tranship.stages import Stopwatch
from tranship.train import TrainEngine

_FETCH_S = 120.0


@dataclass(frozen=True)
class Probe:
    """A short sequence on which trainer and sampler must give the same log-probs. tolerance: largest difference."""

    token_ids: tuple[int, ...]
    temperature: float
    tolerance: float

    def of_trainer(self, engine: TrainEngine) -> np.ndarray:
        """float32 [L - 1]: the trainer's log-probs of tokens 1.. ."""
        ids = np.array(self.token_ids, dtype=np.int32)
        return engine.logprobs([ids[:1]], np.zeros(1, dtype=np.int64), [ids[1:]])[0]

    def of_sampler(self, engine: RolloutEngine) -> np.ndarray:
        """float32 [L - 1]: the sampler's log-probs of tokens 1.. ."""
        return engine.probe(np.array(self.token_ids, dtype=np.int32), self.temperature)

    def check(self, version: int, trainer: np.ndarray, engine: RolloutEngine) -> None:
        """RunError if the sampler's weights do not give the trainer's log-probs."""
        check_probe(version, trainer, self.of_sampler(engine), tolerance=self.tolerance)


@dataclass(frozen=True)
class WeightsReady:
    """What a sampler needs to fetch a version: where its buckets are, and what the trainer's probe gave."""

    announcement: Announcement
    probe_logprobs: np.ndarray


class LocalWeights:
    """Trainer and sampler in one process."""

    def __init__(
        self, trainer: TrainEngine, sampler: RolloutEngine, probe: Probe, *, bucket_bytes: int, watch: Stopwatch
    ) -> None:
        self._trainer = trainer
        self._sampler = sampler
        self._probe = probe
        self._watch = watch
        self._source = WeightSource(trainer.pieces, trainer.storage, sampler.pieces(), bucket_bytes=bucket_bytes)

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
        target_pieces: list[Any],
        probe: Probe,
        put: Callable[[np.ndarray], Any],
        *,
        bucket_bytes: int,
        watch: Stopwatch,
    ) -> None:
        self._trainer = trainer
        self._probe = probe
        self._put = put
        self._watch = watch
        self._source = WeightSource(trainer.pieces, trainer.storage, target_pieces, bucket_bytes=bucket_bytes)

    def publish(self, version: int) -> WeightsReady:
        """Immutable buckets of the weights as they are now, under `version`."""
        with self._watch.time("reshard"):
            expected = self._probe.of_trainer(self._trainer)
            return WeightsReady(self._source.publish(version, self._put), expected)


class FetchedWeights:
    """A sampler's end of a split placement."""

    def __init__(
        self, sampler: RolloutEngine, probe: Probe, get: Callable[[Any, float], np.ndarray], *, watch: Stopwatch
    ):
        self._sampler = sampler
        self._probe = probe
        self._get = get
        self._watch = watch
        self._sink = WeightSink(sampler.pieces(), sampler.storage)
        self._ready: WeightsReady | None = None

    def announce(self, ready: WeightsReady) -> None:
        """A newer version can be fetched; one that was announced and not fetched yet is skipped."""
        if self._ready is None or ready.announcement.version > self._ready.announcement.version:
            self._ready = ready

    def update(self) -> bool:
        """Fetch, verify, probe and use the announced version, if there is one; returns whether there was."""
        if self._ready is None:
            return False
        ready, self._ready = self._ready, None
        with self._watch.time("reshard"):
            self._sampler.begin_update()
            version = self._sink.pull(ready.announcement, lambda ref: self._get(ref, _FETCH_S))
            self._sampler.finish_update(version)
            self._probe.check(version, ready.probe_logprobs, self._sampler)
        return True
