"""The train stage: a batch of groups in, new weights out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tranship.algorithms.estimate import whiten
from tranship.dock import Batch, DockClient, StaleLease
from tranship.stages.stage import Emit, Renewal, Stopwatch
from tranship.train import (
    CriticEngine,
    LossFn,
    LossInputs,
    Totals,
    TrainEngine,
    ValueInputs,
    ValueLossFn,
    loss_needs,
)
from tranship.train.engine import Metrics
from tranship.types import RunError, TrainBatch


@dataclass(frozen=True)
class Critic:
    """PPO's value model, its loss, and for how many batches it alone is trained."""

    engine: CriticEngine
    loss: ValueLossFn
    warmup_steps: int


class TrainStage:
    """Reads prompt, response, advantages, loss_mask, and further columns as its row of the table says; writes nothing.

    Waits for the window of groups of the dock's version; unblocks the coordinator, which advances the version. The
    lease is checked immediately before each optimizer step, since an applied update cannot be refused. A window in
    which no group carries a signal leaves the weights alone and counts as a batch. A critic is trained on the same
    batch, after the policy. with_proximal: the log-probs of the weights before the batch's first optimizer step are
    wanted too; they are computed here, since at any earlier time they would be those of older weights. Emits a
    `trained` event.
    """

    name = "train"

    def __init__(
        self,
        dock: DockClient,
        engine: TrainEngine,
        loss: LossFn,
        *,
        reads: tuple[str, ...],
        groups_per_step: int,
        lease_s: float,
        whiten_advantages: bool,
        with_proximal: bool,
        critic: Critic | None,
        emit: Emit,
        watch: Stopwatch,
        check_stop: Callable[[], None],
    ) -> None:
        self._dock = dock
        self._engine = engine
        self._loss = loss
        self._groups = groups_per_step
        self._lease_s = lease_s
        self._reads = reads
        self._whiten = whiten_advantages
        self._with_proximal = with_proximal
        self._critic = critic
        self._emit = emit
        self._watch = watch
        self._check_stop = check_stop

    def step(self) -> bool:
        """Train on the next window, if it is complete."""
        if not self._dock.changed_since_last_take(self.name):
            return False
        with self._watch.time("dock"):
            batch = self._dock.take_batch(self.name, groups=self._groups)
        if batch is None:
            return False
        event: dict[str, Any] = {"kind": "trained", "version": batch.version, "dropped": batch.num_dropped}
        event["groups"] = list(batch.window)
        event["metrics"], event["staleness"] = {}, []
        start = time.perf_counter()
        if batch.ids:
            event["staleness"] = self._staleness(batch)
            try:
                event["metrics"] = self._update(batch)
            except StaleLease:
                # The weights are as they were: the batch is ready again, for this reader or another.
                return True
        else:
            self._engine.skip()
            if self._critic is not None:
                self._critic.engine.skip()
        event["seconds"] = time.perf_counter() - start
        with self._watch.time("dock"):
            self._dock.trained(batch.lease)
        self._emit(event)
        return True

    def close(self) -> None:
        """Nothing is held."""

    def _staleness(self, batch: Batch) -> list[int]:
        if "policy_versions" not in self._reads:
            return []
        return [batch.version - int(versions.min()) for versions in batch["policy_versions"] if len(versions)]

    def _update(self, batch: Batch) -> dict[str, float]:
        fence = _Fence(self._dock, batch.lease, self._lease_s, self._check_stop)
        train_batch = to_train_batch(batch, self._reads)
        if self._whiten:
            train_batch = replace(train_batch, advantages=whiten(train_batch.advantages, train_batch.response_mask))
        metrics: dict[str, float] = {}
        if self._critic is None or batch.version >= self._critic.warmup_steps:
            if self._with_proximal:
                train_batch = self._with_proximal_logprobs(train_batch, fence)
            gap = _LogprobGap(self._loss, fence.keep)
            with self._watch.time("train"):
                metrics = self._engine.update(train_batch, gap, fence=fence)
            metrics |= gap.metrics()
        else:
            self._engine.skip()
        if self._critic is not None:
            with self._watch.time("critic"):
                metrics |= self._critic.engine.update(train_batch, self._kept(self._critic.loss, fence), fence=fence)
        return metrics

    def _with_proximal_logprobs(self, batch: TrainBatch, fence: _Fence) -> TrainBatch:
        fence.keep()
        with self._watch.time("proximal"):
            logprobs = self._engine.logprobs(batch.prompts, batch.group_of, batch.responses)
        fence.keep()
        return replace(batch, proximal_logprobs=logprobs)

    def _kept(self, loss: ValueLossFn, fence: _Fence) -> ValueLossFn:
        def keep_lease(inputs: ValueInputs, totals: Totals) -> tuple[torch.Tensor, Metrics]:
            fence.keep()
            return loss(inputs, totals)

        return keep_lease


def to_train_batch(batch: Batch, reads: tuple[str, ...]) -> TrainBatch:
    """The columns of a window as the engine takes them; reads: which of them there are.

    Recorded responses were sampled by nobody: their log-probs are zeros that no loss of theirs looks at.
    """

    def optional(column: str) -> list[np.ndarray] | None:
        return list(batch[column]) if column in reads else None

    return TrainBatch(
        samples=list(batch.ids),
        prompts=list(batch.group("prompt")),
        group_of=np.repeat(np.arange(len(batch.groups)), [group.size for group in batch.groups]),
        responses=list(batch["response"]),
        response_mask=list(batch["loss_mask"]),
        logprobs=optional("logprobs") or [np.zeros(len(ids), dtype=np.float32) for ids in batch["response"]],
        advantages=list(batch["advantages"]),
        ref_logprobs=optional("ref_logprobs"),
        values=optional("values"),
        returns=optional("returns"),
        on_policy=[np.asarray(version) == batch.version for version in batch["policy_versions"]]
        if "policy_versions" in reads
        else None,
    )


class _Fence:
    """Keeps a batch's lease while gradients are computed, and checks it immediately before each optimizer step."""

    def __init__(self, dock: DockClient, lease: int, lease_s: float, check_stop: Callable[[], None]) -> None:
        self._dock = dock
        self._lease = lease
        self._renewal = Renewal(lease_s)
        self._check_stop = check_stop
        self._applied = False

    def keep(self) -> None:
        """Between two microbatches: stop if asked to, while no step is applied yet, and renew the lease in time."""
        if not self._applied:
            self._check_stop()
        if self._renewal.due():
            self._dock.renew(self._lease)

    def __call__(self) -> None:
        """StaleLease before the batch's first optimizer step; RunError before a later one, when weights have moved."""
        try:
            self._dock.check([self._lease])
        except StaleLease as error:
            if not self._applied:
                raise
            raise RunError(
                "the batch's lease was lost between two of its optimizer steps (the trainer was silent for longer than "
                "dock.lease_s): the weights lie between two versions; go on from the last checkpoint"
            ) from error
        self._applied = True


class _LogprobGap:
    """A loss that also measures |trainer - sampler| log-probs (I4), on tokens of the version that is being trained,
    at the first optimizer step of a batch, where the trainer's weights are those of that version."""

    def __init__(self, loss: LossFn, before_microbatch: Callable[[], None]) -> None:
        self._loss = loss
        needs = loss_needs(loss)
        self.needs_entropy, self.whole_groups = needs.entropy, needs.whole_groups
        self._before_microbatch = before_microbatch
        self._first: Totals | None = None
        self._max = 0.0
        self._sum = 0.0
        self._count = 0

    def __call__(self, inputs: LossInputs, totals: Totals) -> tuple[torch.Tensor, Metrics]:
        self._before_microbatch()
        self._first = self._first or totals
        if totals is self._first and inputs.on_policy_BT is not None:
            mask = inputs.mask_BT & inputs.on_policy_BT
            gaps = (inputs.logprobs_BT.detach() - inputs.old_logprobs_BT).abs()[mask]
            if gaps.numel():
                self._max = max(self._max, float(gaps.max()))
                self._sum += float(gaps.sum())
                self._count += gaps.numel()
        return self._loss(inputs, totals)

    def metrics(self) -> dict[str, float]:
        """logprob_gap_max and logprob_gap_mean; nothing where no token was of the current version."""
        if not self._count:
            return {}
        return {"logprob_gap_max": self._max, "logprob_gap_mean": self._sum / self._count}
