"""The rollout stage: prompts in, sampled responses out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from tranship.dock import DockClient, StaleLease
from tranship.rollout import GroupRequest, RolloutEngine
from tranship.stages.stage import Renewal, Stopwatch
from tranship.types import Response, SampleId, Sampling, sample_seed

# Validation first: the coordinator waits for it.
_KINDS = ("val", "train")


@dataclass
class _Running:
    lease: int
    samples: tuple[SampleId, ...]
    responses: dict[SampleId, Response] = field(default_factory=dict)


class RolloutStage:
    """Reads prompt and prompt_info; writes response, response_mask, logprobs, policy_versions and finish_reason.

    Waits for groups that the dock lets start at the engine's policy version; unblocks reward (and reference). A group
    is put back whole, when its last sample has ended. Weights arrive between two steps, through `update`: it is called
    at the start of each step and says whether new ones came.
    """

    name = "rollout"

    def __init__(
        self,
        dock: DockClient,
        engine: RolloutEngine,
        *,
        sampling: Sampling,
        run_seed: int,
        lease_s: float,
        watch: Stopwatch,
        update: Callable[[], bool] = lambda: False,
    ) -> None:
        self._dock = dock
        self._engine = engine
        self._sampling = sampling
        self._run_seed = run_seed
        self._watch = watch
        self._update = update
        self._renewal = Renewal(lease_s)
        self._running: dict[int, _Running] = {}

    def step(self) -> bool:
        """Update the weights if new ones are there, start groups, decode one token of each running sample."""
        updated = self._update()
        if updated or self._renewal.due():
            self._forget_lost_groups()
        started = self._start_groups()
        if not self._engine.num_unfinished:
            return updated or started
        with self._watch.time("rollout"):
            finished = self._engine.step()
        for response in finished:
            self._collect(response)
        return True

    def close(self) -> None:
        """Stop all running samples; their groups are somebody else's again when the lease ends."""
        self._engine.abort()
        self._running.clear()

    def _start_groups(self) -> bool:
        if self._engine.policy_version < 0 or self._engine.num_free <= 0:
            return False
        version = self._engine.policy_version
        if not self._dock.changed_since_last_take(self.name, version=version, kinds=_KINDS):
            return False
        started = False
        while self._engine.num_free > 0:
            with self._watch.time("dock"):
                batch = self._dock.take(self.name, max_groups=1, version=version, kinds=_KINDS)
            if batch is None:
                break
            started = True
            for group in batch.groups:
                samples = tuple(SampleId(group.group_id, index) for index in range(group.size))
                prompt = np.array(batch.group("prompt")[0], dtype=np.int32)
                greedy = batch.group("prompt_info")[0].get("greedy", False)
                sampling = replace(self._sampling, temperature=0.0) if greedy else self._sampling
                self._running[group.group_id] = _Running(batch.lease, samples)
                seeds = tuple(sample_seed(self._run_seed, sample) for sample in samples)
                self._engine.submit(GroupRequest(prompt, samples, seeds, sampling))
        return started

    def _collect(self, response: Response) -> None:
        group_id = response.sample.group_id
        running = self._running.get(group_id)
        if running is None:
            return
        running.responses[response.sample] = response
        if len(running.responses) < len(running.samples):
            return
        del self._running[group_id]
        responses = [running.responses[sample] for sample in running.samples]
        with self._watch.time("dock"):
            try:
                self._dock.put(
                    running.samples,
                    {
                        "response": [r.token_ids for r in responses],
                        "response_mask": [np.ones(len(r.token_ids), dtype=bool) for r in responses],
                        "logprobs": [r.logprobs for r in responses],
                        "policy_versions": [r.policy_versions for r in responses],
                        "finish_reason": [r.finish_reason for r in responses],
                    },
                    lease=running.lease,
                    sampled_version=min(int(r.policy_versions.min()) for r in responses if len(r.policy_versions)),
                )
                self._dock.ack(running.lease)
            except StaleLease:
                # The dock has given the group to another reader, or recorded it as too stale: this copy is nobody's.
                return

    def _forget_lost_groups(self) -> None:
        for group_id, running in list(self._running.items()):
            try:
                self._dock.renew(running.lease)
            except StaleLease:
                del self._running[group_id]
                self._engine.abort([sample for sample in running.samples if sample not in running.responses])
