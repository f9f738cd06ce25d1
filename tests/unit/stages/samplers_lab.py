"""Several samplers on one dock in simulated time: the real rollout stage and the real dock, over engines whose steps
take as long as they are told. One seed gives one history."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from tranship.dock import Batch, Dock, DockClient, StageNeeds
from tranship.rollout import GroupRequest
from tranship.stages import Stopwatch
from tranship.stages.rollout import RolloutStage
from tranship.trainer.forecast import LengthForecast
from tranship.types import Response, SampleId, Sampling

CAP = 4096


@dataclass(frozen=True)
class Cost:
    """Seconds of a decoding step of b samples, fixed + each * b, and of a prompt's prefill."""

    fixed: float
    each: float
    prefill: float

    def times(self, factor: float) -> Cost:
        """Of an engine that is so many times slower."""
        return Cost(self.fixed * factor, self.each * factor, self.prefill * factor)


# Where the products dominate, as on a CPU, and where reading the weights does, as on a GPU.
BUSY = Cost(fixed=0.010, each=0.002, prefill=0.1)
WIDE = Cost(fixed=0.020, each=0.0001, prefill=0.03)


class TimedEngine:
    """Slots and a queue, as the native engine has them; a step moves `now` on.

    held: (from, seconds), a standstill. taken: slots that others use, as clients of an endpoint do.
    """

    def __init__(self, cost: Cost, slots: int, length_of: Callable[[SampleId], int]) -> None:
        self.cost, self.slots, self.length_of = cost, slots, cache(length_of)
        self.now = self.busy = 0.0
        self.policy_version = 0
        self.prefills = 0
        self.held: tuple[float, float] | None = None
        self.taken = 0
        self._queue: deque[deque[SampleId]] = deque()
        # Of running samples: the steps at which each ends and began.
        self._ends: dict[SampleId, int] = {}
        self._due: dict[int, list[SampleId]] = {}
        self._steps = 0
        self._prefilled: deque[SampleId] | None = None
        self._begun: dict[SampleId, int] = {}

    @property
    def num_unfinished(self) -> int:
        return len(self._ends) + sum(map(len, self._queue))

    @property
    def num_free(self) -> int:
        return max(0, self.slots - self.taken - self.num_unfinished)

    def submit(self, request: GroupRequest) -> None:
        self._queue.append(deque(request.samples))

    def step(self) -> list[Response]:
        if self.held is not None and self.now >= self.held[0]:
            self.now += self.held[1]
            self.held = None
        seconds = 0.0
        while self._queue and len(self._ends) < self.slots - self.taken:
            waiting = self._queue[0]
            if self._prefilled is not waiting:
                self._prefilled = waiting
                self.prefills += 1
                seconds += self.cost.prefill
            sample = waiting.popleft()
            self._begun[sample] = self._steps
            self._ends[sample] = end = self._steps + self.length_of(sample)
            self._due.setdefault(end, []).append(sample)
            if not waiting:
                self._queue.popleft()
        seconds += self.cost.fixed + self.cost.each * len(self._ends)
        self.now += seconds
        self.busy += seconds
        self._steps += 1
        due = self._due.pop(self._steps, ())
        return [self._stop(sample) for sample in due if self._ends.get(sample) == self._steps]

    def peek(self, starts: Mapping[SampleId, int]) -> list[Response]:
        begun = {sample: self._steps - step for sample, step in self._begun.items() if sample in starts}
        return [self._response(sample, made) for sample, made in begun.items() if made > starts[sample]]

    def abort(self, samples: Sequence[SampleId] | None = None) -> list[Response]:
        gone = set(samples) if samples is not None else {*self._ends, *(s for waiting in self._queue for s in waiting)}
        stopped = [self._response(s, 0) for waiting in self._queue for s in waiting if s in gone]
        for waiting in self._queue:
            for sample in gone.intersection(waiting):
                waiting.remove(sample)
        self._queue = deque(waiting for waiting in self._queue if waiting)
        return stopped + [self._stop(sample) for sample in list(self._ends) if sample in gone]

    def _stop(self, sample: SampleId) -> Response:
        del self._ends[sample]
        return self._response(sample, self._steps - self._begun.pop(sample))

    def _response(self, sample: SampleId, count: int) -> Response:
        ids = np.full(count, sample.sample_index, np.int32)
        versions = np.full(count, self.policy_version, np.int32)
        return Response(sample, ids, np.zeros(count, np.float32), versions, "stop")


@dataclass
class Report:
    """Of one step: seconds until the last sample, and the idle share of the samplers in them; prefills per group."""

    makespan: float
    idle: float
    prefills: float


@dataclass
class Lab:
    """Some samplers, and prompts whose responses have log-normal lengths: of a prompt's own scale, drawn once.

    prompts: how many there are; group g is of prompt g modulo that. apart: each sample is a group of its own, as if a
    prompt's samples could go to different samplers, and its prefill cost nothing. later: (time, what happens then).
    """

    costs: list[Cost]
    slots: int
    groups: int
    size: int
    policy: str = "dispatch"
    seed: int = 0
    prompts: int = 1 << 40
    apart: bool = False
    later: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.samples_each = self.size
        if self.apart:
            self.groups, self.size = self.groups * self.size, 1
            self.costs = [Cost(cost.fixed, cost.each, 0.0) for cost in self.costs]
        self.now = 0.0
        self.dock = Dock(
            [
                StageNeeds("rollout", ("prompt", "prompt_info"), policy=self.policy, readers=len(self.costs)),
                StageNeeds("train", ("response",)),
            ],
            run_id="lab",
            batch_groups=self.groups,
            staleness=0,
            lease_s=1e9,
            slab_bytes=1 << 22,
            capacity_bytes=1 << 30,
            shared=False,
            ordered=True,
            clock=lambda: self.now,
        )
        self.forecast = LengthForecast(CAP)
        self.engines = [TimedEngine(cost, self.slots, self.length_of) for cost in self.costs]
        self.names = [f"sampler-{place}" for place in range(len(self.costs))]
        self.stages = [self._stage(engine, name) for engine, name in zip(self.engines, self.names, strict=True)]
        self.trainer = self._client("trainer")

    def close(self) -> None:
        """Let the payload go."""
        self.dock.close()

    def prompt_of(self, group_id: int) -> int:
        """The prompt of a group."""
        return (group_id // self.samples_each if self.apart else group_id) % self.prompts

    def length_of(self, sample: SampleId) -> int:
        """How long a sample becomes: the same, whether its prompt's samples are apart or not."""
        number = sample.group_id if self.apart else sample.group_id * self.samples_each + sample.sample_index
        scale = np.random.default_rng([self.seed, self.prompt_of(sample.group_id)]).lognormal(5.3, 0.8)
        return int(np.clip(scale * np.random.default_rng([self.seed, 7, number]).lognormal(0.0, 0.4), 1, CAP))

    def kill(self, place: int) -> None:
        """A sampler dies, and its successor, which knows nothing, is there at once."""
        self.dock.retire(self.names[place])
        engine = TimedEngine(self.costs[place], self.slots, self.length_of)
        engine.now, engine.policy_version = self.now, self.dock.version
        self.names[place] += "+"
        self.engines[place], self.stages[place] = engine, self._stage(engine, self.names[place])

    def step(self) -> Report:
        """One synchronous step: all groups are there at its start."""
        version, start = self.dock.version, max(engine.now for engine in self.engines)
        for engine in self.engines:
            engine.now, engine.busy, engine.policy_version, engine.prefills = start, 0.0, version, 0
        columns = {"prompt": np.zeros(200, np.int32), "prompt_info": {"greedy": False}}
        ids = range(version * self.groups, (version + 1) * self.groups)
        expected = [self.forecast.expect(self.prompt_of(group_id)) for group_id in ids]
        self.trainer.admit([(group_id, self.size, "train", columns) for group_id in ids], expected)
        batch = self._sample()
        for group in batch.groups:
            lengths = [len(batch["response"][row]) for row in group.rows]
            self.forecast.observe(self.prompt_of(group.group_id), lengths)
            assert lengths == [self.length_of(SampleId(group.group_id, index)) for index in range(self.size)]
        self.dock.trained(batch.lease)
        self.dock.advance(version + 1)
        span = max(engine.now for engine in self.engines if engine.busy) - start
        idle = 1 - sum(engine.busy for engine in self.engines) / (span * len(self.engines))
        self.reports.append(Report(span, idle, sum(engine.prefills for engine in self.engines) / self.groups))
        return self.reports[-1]

    def _sample(self) -> Batch:
        """Each sampler's passes in the order of time, until the batch is there. One without work waits for a change."""
        blocked: dict[int, int] = {}
        while True:
            ready = [place for place in range(len(self.engines)) if blocked.get(place, -1) < self.dock.seq]
            assert ready, "everybody waits for somebody else"
            place = min(ready, key=lambda place: (self.engines[place].now, place))
            engine = self.engines[place]
            self.now = max(self.now, engine.now)
            assert self.now < 1e6, "somebody goes on without an end"
            if self.later and self.later[0][0] <= self.now:
                self.later.pop(0)[1]()
                continue
            if blocked.pop(place, None) is not None:
                engine.now = self.now
            if not self.stages[place].step():
                blocked[place] = self.dock.seq
            batch = self.trainer.take_batch("train", groups=self.groups)
            if batch is not None:
                return batch

    def _client(self, name: str) -> DockClient:
        return DockClient(lambda method, *a, **k: getattr(self.dock, method)(*a, **k), name, wait_s=0)

    def _stage(self, engine: TimedEngine, name: str) -> RolloutStage:
        return RolloutStage(
            self._client(name),
            engine,  # type: ignore[arg-type]
            sampling=Sampling(CAP),
            run_seed=0,
            lease_s=1e9,
            watch=Stopwatch(),
            clock=lambda: engine.now,
        )
