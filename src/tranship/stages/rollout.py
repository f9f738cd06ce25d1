"""The rollout stage: prompts in, sampled responses out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from tranship.dock import Batch, DockClient, StaleLease
from tranship.dock.messages import Kind, Load
from tranship.rollout import GroupRequest, RolloutEngine
from tranship.stages.episodes import Outcome, single_turn
from tranship.stages.load import LoadMeter
from tranship.stages.stage import Renewal, Stopwatch
from tranship.types import Response, SampleId, Sampling, sample_seed


@dataclass
class _Running:
    lease: int
    samples: tuple[SampleId, ...]
    prompt_tokens: int
    outcomes: dict[SampleId, Outcome] = field(default_factory=dict)


class World(Protocol):
    """What makes a group's samples where a response is more than one turn of the engine."""

    @property
    def num_waiting(self) -> int:
        """Samples that have begun, have not ended, and wait for another than the engine."""
        ...

    def start(self, samples: Sequence[SampleId], prompt: np.ndarray, info: dict[str, Any], sampling: Sampling) -> None:
        """Begin the samples of one group."""
        ...

    def turn_ended(self, response: Response) -> None:
        """The engine has finished a turn."""
        ...

    def advance(self, policy_version: int) -> tuple[list[GroupRequest], list[Outcome]]:
        """The turns that the engine is to sample next, and the samples that have ended."""
        ...

    def stop(self, samples: Sequence[SampleId]) -> None:
        """Give up those of the samples that run."""
        ...

    def close(self) -> None:
        """Give up everything."""
        ...


class RolloutStage:
    """Reads prompt and prompt_info; writes response, response_mask, logprobs, policy_versions, finish_reason and
    rollout_info.

    Waits for groups that the dock lets start at the engine's policy version; unblocks reward (and reference). A group
    is put back whole, when its last sample has ended. Weights arrive between two steps, through `update`: it is called
    at the start of each step and says whether new ones came.

    With each take it says what it has left to do, so that the dock can share out what waits (the policy dispatch).

    kinds: of the groups that it takes. world: what makes samples of several turns; None: a response is one turn.
    clock: seconds, for how long a step takes.
    rollout_info is what `Outcome.info` says, {} without a world.
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
        kinds: tuple[Kind, ...] = ("val", "train"),
        world: World | None = None,
        update: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._dock = dock
        self._engine = engine
        self._sampling = sampling
        self._run_seed = run_seed
        self._watch = watch
        self._kinds = kinds
        self._world = world
        self._update = update
        self._clock = clock
        self._meter = LoadMeter(sampling.max_response_tokens)
        self._renewal = Renewal(lease_s)
        self._running: dict[int, _Running] = {}
        self._unbegun: set[int] = set()

    def step(self) -> bool:
        """Update the weights if new ones are there, start groups, decode one token of each running sample."""
        updated = self._update()
        if updated or self._renewal.due():
            self._forget_lost_groups()
        progress = self._start_groups() or updated
        if self._world is not None:
            progress = self._advance(self._world) or progress
        if not self._engine.num_unfinished:
            return progress
        start = self._clock()
        with self._watch.time("rollout"):
            finished = self._engine.step()
        self._note_begun(finished)
        self._meter.stepped(self._clock() - start)
        for response in finished:
            if self._world is not None:
                self._world.turn_ended(response)
            else:
                self._collect(single_turn(response))
        self._give_back()
        return True

    def close(self) -> None:
        """Stop all running samples; their groups are somebody else's again when the lease ends."""
        self._engine.abort()
        self._running.clear()
        self._unbegun.clear()
        self._meter.clear()
        if self._world is not None:
            self._world.close()

    @property
    def _num_free(self) -> int:
        """Samples that may be started. One whose environment is at work keeps its place in the engine."""
        return self._engine.num_free - (self._world.num_waiting if self._world is not None else 0)

    @property
    def _load(self) -> Load:
        free = self._engine.num_free
        # Where none is free, some of what is unfinished may wait for a slot.
        return self._meter.load(free + self._engine.num_unfinished if free else 0)

    def _start_groups(self) -> bool:
        if self._engine.policy_version < 0 or self._num_free <= 0:
            return False
        version = self._engine.policy_version
        if not self._dock.changed_since_last_take(self.name, version=version, kinds=self._kinds):
            return False
        started = False
        while self._num_free > 0:
            with self._watch.time("dock"):
                batch = self._dock.take(self.name, max_groups=1, version=version, kinds=self._kinds, load=self._load)
            if batch is None:
                break
            started = True
            self._start(batch)
        return started

    def _start(self, batch: Batch) -> None:
        (group,) = batch.groups
        samples = tuple(SampleId(group.group_id, index, group.attempt) for index in range(group.size))
        prompt = np.array(batch.group("prompt")[0], dtype=np.int32)
        info = batch.group("prompt_info")[0]
        sampling = replace(self._sampling, temperature=0.0) if info.get("greedy", False) else self._sampling
        if group.group_id in self._running:
            # Its earlier lease has ended unnoticed, while this process was held.
            self._forget(group.group_id)
        self._running[group.group_id] = _Running(batch.lease, samples, len(prompt))
        self._meter.add(samples, group.expected_tokens)
        if self._world is not None:
            # Their world is at work from now on.
            self._meter.begin(samples)
            self._world.start(samples, prompt, info, sampling)
        else:
            self._unbegun.add(group.group_id)
            seeds = tuple(sample_seed(self._run_seed, sample) for sample in samples)
            self._engine.submit(GroupRequest(prompt, samples, seeds, sampling))

    def _advance(self, world: World) -> bool:
        """Go on with the samples whose world has answered."""
        requests, outcomes = world.advance(self._engine.policy_version)
        for request in requests:
            self._engine.submit(request)
        for outcome in outcomes:
            self._collect(outcome)
        return bool(requests or outcomes)

    def _collect(self, outcome: Outcome) -> None:
        group_id = outcome.response.sample.group_id
        self._meter.remove([outcome.response.sample])
        running = self._running.get(group_id)
        if running is None:
            return
        running.outcomes[outcome.response.sample] = outcome
        if len(running.outcomes) < len(running.samples):
            return
        del self._running[group_id]
        self._unbegun.discard(group_id)
        self._put(running)

    def _put(self, running: _Running) -> None:
        outcomes = [running.outcomes[sample] for sample in running.samples]
        responses = [outcome.response for outcome in outcomes]
        versions = [
            response.policy_versions[outcome.mask] for response, outcome in zip(responses, outcomes, strict=True)
        ]
        with self._watch.time("dock"):
            try:
                self._dock.put(
                    running.samples,
                    {
                        "response": [r.token_ids for r in responses],
                        "response_mask": [outcome.mask for outcome in outcomes],
                        "logprobs": [r.logprobs for r in responses],
                        "policy_versions": [r.policy_versions for r in responses],
                        "finish_reason": [r.finish_reason for r in responses],
                        "rollout_info": [outcome.info for outcome in outcomes],
                    },
                    lease=running.lease,
                    # Of a group without a single sampled token (no session began) it is the version in use.
                    sampled_version=min(
                        (int(v.min()) for v in versions if len(v)), default=self._engine.policy_version
                    ),
                    tokens=[running.prompt_tokens + len(r.token_ids) for r in responses],
                )
                self._dock.ack(running.lease)
            except StaleLease:
                # The dock has given the group to another reader, or recorded it as too stale: this copy is nobody's.
                return

    def _note_begun(self, finished: Sequence[Response]) -> None:
        """Of groups that had no token yet, see which have some now."""
        if not self._unbegun:
            return
        waiting = [sample for group_id in self._unbegun for sample in self._running[group_id].samples]
        made = [*finished, *self._engine.peek(dict.fromkeys(waiting, 0))]
        for group_id in self._unbegun.intersection(response.sample.group_id for response in made):
            self._unbegun.discard(group_id)
            self._meter.begin(self._running[group_id].samples)

    def _give_back(self) -> None:
        """Return groups that wait here, and that a sampler with nothing to do would be done with earlier."""
        if not self._unbegun:
            return
        for group_id in self._dock.better_elsewhere(self.name, sorted(self._unbegun), self._load):
            lease = self._running[group_id].lease
            self._forget(group_id)
            try:
                self._dock.release(lease)
            except StaleLease:
                continue

    def _forget_lost_groups(self) -> None:
        for group_id, running in list(self._running.items()):
            try:
                self._dock.renew(running.lease)
            except StaleLease:
                self._forget(group_id)

    def _forget(self, group_id: int) -> None:
        running = self._running.pop(group_id)
        self._unbegun.discard(group_id)
        self._meter.remove(running.samples)
        self._engine.abort([sample for sample in running.samples if sample not in running.outcomes])
        if self._world is not None:
            self._world.stop(running.samples)
