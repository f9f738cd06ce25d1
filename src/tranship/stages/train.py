"""The train stage: a batch of groups in, new weights out."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tranship.dock import Batch, DockClient, StaleLease
from tranship.stages.stage import Emit, Renewal, Stopwatch
from tranship.train import LossFn, LossInputs, Totals, TrainEngine
from tranship.types import RunError, TrainBatch


class TrainStage:
    """Reads prompt, response, policy_versions, logprobs, advantages, loss_mask (and ref_logprobs); writes nothing.

    Waits for the window of groups of the dock's version; unblocks the coordinator, which advances the version. The
    lease is checked immediately before each optimizer step, since an applied update cannot be refused. A window in
    which no group carries a signal leaves the weights alone and counts as a batch. Emits a `trained` event.
    """

    name = "train"

    def __init__(
        self,
        dock: DockClient,
        engine: TrainEngine,
        loss: LossFn,
        *,
        groups_per_step: int,
        lease_s: float,
        with_reference: bool,
        emit: Emit,
        watch: Stopwatch,
        check_stop: Callable[[], None],
    ) -> None:
        self._dock = dock
        self._engine = engine
        self._loss = loss
        self._groups = groups_per_step
        self._lease_s = lease_s
        self._with_reference = with_reference
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
            event["staleness"] = [batch.version - int(versions.min()) for versions in batch["policy_versions"]]
            try:
                event["metrics"] = self._update(batch)
            except StaleLease:
                # The weights are as they were: the batch is ready again, for this reader or another.
                return True
        event["seconds"] = time.perf_counter() - start
        with self._watch.time("dock"):
            self._dock.trained(batch.lease)
        self._emit(event)
        return True

    def close(self) -> None:
        """Nothing is held."""

    def _update(self, batch: Batch) -> dict[str, float]:
        fence = _Fence(self._dock, batch.lease, self._lease_s, self._check_stop)
        gap = _LogprobGap(self._loss, fence.keep)
        with self._watch.time("train"):
            metrics = self._engine.update(to_train_batch(batch, self._with_reference), gap, fence=fence)
        return {**metrics, **gap.metrics()}


def to_train_batch(batch: Batch, with_reference: bool) -> TrainBatch:
    """The columns of a window as the engine takes them."""
    versions = batch["policy_versions"]
    return TrainBatch(
        samples=list(batch.ids),
        prompts=list(batch.group("prompt")),
        group_of=np.repeat(np.arange(len(batch.groups)), [group.size for group in batch.groups]),
        responses=list(batch["response"]),
        response_mask=list(batch["loss_mask"]),
        logprobs=list(batch["logprobs"]),
        advantages=list(batch["advantages"]),
        ref_logprobs=list(batch["ref_logprobs"]) if with_reference else None,
        on_policy=[np.asarray(version) == batch.version for version in versions],
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
        self._before_microbatch = before_microbatch
        self._first: Totals | None = None
        self._max = 0.0
        self._sum = 0.0
        self._count = 0

    def __call__(self, inputs: LossInputs, totals: Totals) -> tuple[torch.Tensor, dict[str, tuple[float, float]]]:
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
