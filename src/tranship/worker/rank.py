"""A rank other than the first of a sampler that is spread over several processes: it follows the first one.

It hosts no stage and knows no dock. Weights come to it as to the first rank, by the plan and with its digests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from tranship.layouts import Piece
from tranship.models.tokenizer import decode_response, load_tokenizer
from tranship.observe import rss_bytes
from tranship.observe.profile import Profiler
from tranship.reshard import WeightSink
from tranship.rollout import RankLost
from tranship.rollout.native.leader import Door, FollowingEngine
from tranship.runtime import Context, ProcessDied
from tranship.worker.build import build_native_rank
from tranship.worker.spec import WorkerSpec
from tranship.worker.weights import FETCH_S, WeightsReady, plan_weights

# A first rank that is busy may still have to tell of the version before the newest.
_VERSIONS_KEPT = 2


@contextmanager
def as_death(name: str) -> Iterator[None]:
    """A process that has lost another rank is as good as dead: it is to be started again, and all ranks with it."""
    try:
        yield
    except RankLost as error:
        raise ProcessDied(f"process {name!r} (pid {os.getpid()}) cannot go on: {error}", name, os.getpid()) from error


class SamplerRank:
    """Rank `rank` of the sampler that `spec` describes."""

    def __init__(self, spec: WorkerSpec, rank: int, context: Context) -> None:
        torch.set_num_threads(spec.num_threads)
        disable_progress_bar()
        if spec.config.run.deterministic:
            torch.use_deterministic_algorithms(True)
        self._rank = rank
        self._context = context
        self._profiler = Profiler(Path(spec.config.run.dir), context.name, spec.config.observe.profile_steps)
        self._tokenizer = load_tokenizer(Path(spec.model_dir), spec.config.model.trust_remote_code)
        self._engine, ranks = build_native_rank(spec, self._text_of, rank)
        self._follower = FollowingEngine(self._engine, ranks, context.host, wakeup=context.wakeup, fill=self._fill)
        self._sink: WeightSink | None = None
        self._ready: dict[int, WeightsReady] = {}

    def poll(self) -> bool:
        """Do what the first rank has said; returns whether anything was done."""
        with as_death(self._context.name):
            return self._follower.poll()

    def close(self) -> None:
        """Take part no more."""
        self._profiler.close()
        self._follower.close()

    def door(self) -> Door:
        """Where the first rank finds this one."""
        return self._follower.door

    def pieces(self) -> list[Piece]:
        """Where this rank's weights lie."""
        return self._engine.pieces()

    def connect_weights(self, source: list[Piece], targets: list[list[Piece]]) -> None:
        """Plan the way from the trainer's pieces to those of a sampler's ranks."""
        self._sink = WeightSink(plan_weights(source, targets), self._engine.storage, self._rank)

    def announce_weights(self, ready: WeightsReady) -> None:
        """A version can be fetched; that is done when the first rank says so."""
        self._ready[ready.announcement.version] = ready
        for version in sorted(self._ready)[:-_VERSIONS_KEPT]:
            del self._ready[version]

    def profile_step(self, step: int) -> None:
        """Step `step` begins here, if it is one that is to be profiled; the one before it is written."""
        self._profiler.begin(step)

    def timings(self) -> dict[str, float]:
        """This process's resident memory now; its time is that of the first rank."""
        return {"rss_bytes": float(rss_bytes())}

    def _fill(self, name: str) -> bool:
        """Fetch the version of this number, if it has been announced here already."""
        version = int(name)
        if version not in self._ready:
            return False
        assert self._sink is not None, "the way of the weights has not been planned"
        announcement = self._ready[version].announcement
        self._sink.pull([announcement], lambda ref: self._context.objects.get(ref, FETCH_S))
        self._ready = {known: ready for known, ready in self._ready.items() if known > version}
        return True

    def _text_of(self, token_ids: Sequence[int]) -> str:
        return decode_response(self._tokenizer, np.asarray(token_ids, dtype=np.int64))
