"""The bound on staleness, with generators that are faster and slower than the trainer, on a clock of its own."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import pytest

STEPS = 20
SLOW = 9  # the id of the slow prompt; not one that is filtered


@dataclass
class Simulation:
    """A trainer that takes 1 s a batch, and `slots` samplers. Everything happens through the dock's client."""

    rig: object
    seconds_of: Callable[[int], float]
    slots: int = 1
    weights_late_s: float = 0.0
    filtered: Callable[[int], bool] = lambda group_id: False
    started: dict[int, int] = field(default_factory=dict)
    ages: Counter = field(default_factory=Counter)
    windows: list[tuple[int, ...]] = field(default_factory=list)
    busy: int = 0
    training: bool = False
    sampler_version: int = 0
    events: list = field(default_factory=list)
    order: object = field(default_factory=count)

    def at(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.rig.clock.now + delay, next(self.order), action))

    def run(self, total: int) -> None:
        while self.rig.dock.version < STEPS:
            room = min(self.rig.dock.num_admissible(), total - self.rig.next_id)
            self.rig.admit(room)
            self.fill_samplers()
            self.begin_training()
            assert self.events, f"the run stands still at version {self.rig.dock.version}: {self.rig.dock.ledger}"
            self.rig.clock.now, _, action = heapq.heappop(self.events)
            action()

    def fill_samplers(self) -> None:
        while self.busy < self.slots:
            batch = self.rig.client.take("rollout", max_groups=1, version=self.sampler_version)
            if batch is None:
                return
            self.busy += 1
            group_id = batch.groups[0].group_id
            self.started[group_id] = self.sampler_version
            self.at(self.seconds_of(group_id), partial(self.end_sampling, batch))

    def end_sampling(self, batch) -> None:
        self.busy -= 1
        group_id = batch.groups[0].group_id
        if self.rig.dock.ledger.outcome(group_id) != "in flight":
            return
        if self.filtered(group_id):
            self.rig.client.drop([group_id], "filtered", batch.lease)
            return
        self.rig.generate(batch, self.started[group_id])
        self.rig.score()

    def begin_training(self) -> None:
        if self.training:
            return
        batch = self.rig.take_batch()
        if batch is None:
            return
        self.training = True
        self.windows.append(batch.window)
        for group in batch.groups:
            assert group.oldest_version == self.started[group.group_id]
            self.ages[batch.version - self.started[group.group_id]] += 1
        self.at(1.0, lambda: self.end_training(batch.lease))

    def end_training(self, lease: int) -> None:
        self.rig.client.check([lease])
        self.rig.trained += self.rig.client.trained(lease)
        version = self.rig.dock.version + 1
        self.rig.client.advance(version)
        self.training = False
        self.at(self.weights_late_s, lambda: setattr(self, "sampler_version", version))


def simulate(make_rig, *, batch_groups: int, staleness: int, total: int | None = None, **options) -> Simulation:
    dock_options = {key: options.pop(key) for key in ("ordered", "on_stale") if key in options}
    rig = make_rig(batch_groups=batch_groups, staleness=staleness, lease_s=1e9, **dock_options)
    simulation = Simulation(rig, **options)
    simulation.run(total or STEPS * batch_groups)
    return simulation


# Seconds to sample one group when the trainer takes 1 s for a batch of 4: one sampler is 5 times faster, and slower.
SPEEDS = {"faster": 0.05, "slower": 1.25}


@pytest.mark.parametrize("ordered", [False, True], ids=["oldest", "ordered"])
@pytest.mark.parametrize("slots", [1, 6])
@pytest.mark.parametrize("weights_late_s", [0.0, 0.7, 2.5])
@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_every_prompt_is_used_once_and_none_is_older_than_the_bound(
    make_rig, staleness, speed, weights_late_s, slots, ordered
):
    """One prompt is ten times slower than the others, and is trained on too."""
    seconds = SPEEDS[speed]
    run = simulate(
        make_rig,
        batch_groups=4,
        staleness=staleness,
        ordered=ordered,
        seconds_of=lambda group_id: 10 * seconds if group_id == SLOW else seconds,
        slots=slots,
        weights_late_s=weights_late_s,
        filtered=lambda group_id: group_id % 5 == 1,
    )
    filtered = [group_id for group_id in range(80) if group_id % 5 == 1]
    assert sorted(run.rig.trained) == [group_id for group_id in range(80) if group_id not in filtered]
    assert max(run.ages) <= staleness
    assert run.rig.dock.ledger.filtered == len(filtered)
    assert run.rig.dock.ledger.in_flight == 0
    assert sorted(group_id for window in run.windows for group_id in window) == list(range(80))
    if ordered or staleness == 0:
        assert run.windows == [tuple(range(4 * step, 4 * step + 4)) for step in range(STEPS)]


def test_a_faster_generator_uses_the_bound_and_stays_in_it(make_rig):
    run = simulate(make_rig, batch_groups=4, staleness=2, seconds_of=lambda group_id: 0.05)
    assert max(run.ages) == 2
    assert run.ages[2] >= 60


@pytest.mark.parametrize("slots", [2, 8])
def test_a_very_slow_prompt_is_waited_for(make_rig, slots):
    """Without the gate this one would be dozens of versions old: the others go on within the cap of admission."""
    run = simulate(
        make_rig,
        batch_groups=1,
        staleness=2,
        seconds_of=lambda group_id: 40.0 if group_id == 5 else 0.1,
        slots=slots,
    )
    assert max(run.ages) <= 2
    assert 5 in run.rig.trained
    assert run.rig.clock.now > 40


def test_discard_records_a_very_slow_prompt_instead(make_rig):
    run = simulate(
        make_rig,
        batch_groups=1,
        staleness=2,
        on_stale="discard",
        seconds_of=lambda group_id: 400.0 if group_id == 5 else 0.1,
        slots=4,
    )
    ledger = run.rig.dock.ledger
    assert ledger.outcome(5) == "too_stale"
    assert ledger.too_stale == 1
    assert ledger.trained == STEPS - 1
    assert max(run.ages) <= 2
    assert run.rig.clock.now < 40
    assert len({group_id for window in run.windows for group_id in window}) == STEPS


@pytest.mark.parametrize("speed", SPEEDS)
@pytest.mark.parametrize("slots", [1, 6])
def test_discard_ends_with_every_prompt_recorded(make_rig, speed, slots):
    seconds = SPEEDS[speed]
    run = simulate(
        make_rig,
        batch_groups=4,
        staleness=1,
        on_stale="discard",
        seconds_of=lambda group_id: seconds * (30 if group_id % 7 == 3 else 1),
        slots=slots,
        weights_late_s=0.3,
    )
    ledger = run.rig.dock.ledger
    assert ledger.trained + ledger.too_stale == 80
    assert max(run.ages) <= 1
    assert sorted(group_id for window in run.windows for group_id in window) == list(range(80))


def test_at_bound_0_a_sampler_starts_only_at_the_version_that_is_trained_next(make_rig):
    rig = make_rig(batch_groups=1, staleness=0)
    rig.make_ready()
    batch = rig.take_batch()
    assert rig.start(version=0) is None
    rig.client.trained(batch.lease)
    rig.admit()
    assert rig.start(version=0) is None
    assert rig.start(version=1) is not None


def test_weights_that_do_not_exist_yet_are_refused(make_rig):
    rig = make_rig(batch_groups=1, staleness=1)
    rig.admit()
    with pytest.raises(ValueError, match="sampler is at version 1, and the newest one is 0"):
        rig.start(version=1)


def test_a_sampler_that_is_too_far_behind_gets_nothing(make_rig):
    rig = make_rig(batch_groups=1, staleness=1)
    for _ in range(3):
        rig.make_ready(1)
        rig.train()
    rig.admit()
    assert rig.start(version=1) is None
    assert rig.start(version=2) is not None


def test_a_sampler_that_is_behind_gets_as_many_as_can_still_be_trained_in_time(make_rig):
    rig = make_rig(batch_groups=2, staleness=1)
    rig.make_ready(2)
    rig.train()
    rig.admit(4)
    assert [group.group_id for group in rig.start(9, version=0).groups] == [2, 3]
    assert rig.start(9, version=0) is None
    assert [group.group_id for group in rig.start(9, version=1).groups] == [4, 5]


def test_a_prompt_that_comes_back_unfinished_holds_nobody_back(make_rig):
    rig = make_rig(batch_groups=1, staleness=1)
    rig.admit(2)
    slow, quick = rig.start(), rig.start()
    rig.generate(quick)
    rig.score()
    assert rig.train() == [1]
    rig.admit(1)
    rig.generate(rig.start())
    rig.score()
    assert rig.take_batch() is None, "the batch of version 1 must wait for the group that began at version 0"
    rig.client.release(slow.lease)
    assert rig.train() == [2]
    rig.generate(rig.start(version=2))
    rig.score()
    assert rig.train() == [0]


@pytest.mark.parametrize("said", [0, None])
def test_partial_rollouts_keep_the_version_of_their_oldest_token(make_rig, said):
    """Half of a group was put at version 0; whoever does the rest at version 1 does not make it younger."""
    rig = make_rig(batch_groups=1, staleness=1)
    rig.admit(2)
    first, other = rig.start(), rig.start()
    rig.client.put(first.ids[:1], {"response": [[1]], "reward": [1.0]}, first.lease, sampled_version=said)
    rig.client.put(other.ids, {"response": [[1]] * 2, "reward": [1.0] * 2}, other.lease, sampled_version=said)
    rig.client.ack(other.lease)
    rig.client.release(first.lease)
    taken = rig.take_batch()
    assert taken.window == (1,)
    rig.client.trained(taken.lease)
    rig.client.advance(1)
    again = rig.start(version=1)
    assert again.groups[0].oldest_version == 0
    rig.admit(1)
    newer = rig.start(version=1)
    rig.client.put(newer.ids, {"response": [[1]] * 2, "reward": [1.0] * 2}, newer.lease)
    assert rig.take_batch() is None
    rig.client.put(again.ids, {"response": [[1]] * 2, "reward": [1.0] * 2}, again.lease)
    taken = rig.take_batch()
    assert (taken.window, taken.groups[0].oldest_version) == ((0,), 0)


def test_a_group_that_starts_later_than_it_was_taken_gets_its_time(make_rig):
    rig = make_rig(batch_groups=1, staleness=1)
    rig.admit(2)
    batch, other = rig.start(), rig.start()
    rig.generate(other)
    rig.score()
    rig.train()
    rig.client.started(batch.lease, 0, 1)
    rig.admit(1)
    rig.generate(rig.start())
    rig.score()
    assert rig.train() == [2]
    rig.generate(batch, 1)
    rig.score()
    assert rig.train() == [0]


def test_tokens_older_than_the_bound_allows_are_refused(make_rig):
    rig = make_rig(batch_groups=1, staleness=1)
    for _ in range(2):
        rig.make_ready(1)
        rig.train()
    rig.admit(2)
    batch, other = rig.start(version=2), rig.start(version=2)
    with pytest.raises(ValueError, match="group 2 may not hold tokens of version 0: staleness bound 1"):
        rig.generate(batch, sampled_version=0)
    rig.generate(batch, sampled_version=1)
    with pytest.raises(ValueError, match="may not start at version 1"):
        rig.client.started(other.lease, 3, 1)
    rig.score()
    assert rig.train() == [2]
