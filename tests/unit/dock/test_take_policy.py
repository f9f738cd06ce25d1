"""What a take gives under each policy, apart from the rest of a dock; whole histories are in test_history."""

from __future__ import annotations

import heapq
import math
import random
import statistics
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tranship.dock import StageNeeds
from tranship.dock.checks import check_load
from tranship.dock.controller import Controller
from tranship.dock.messages import Load
from tranship.dock.queues import FirstCome
from tranship.dock.take_policy import POLICIES, Facts, policy_of
from tranship.types import SampleId, UserError


class NewestFirst(FirstCome):
    """A policy from outside: last in, first out."""

    def pick(self, reader, limit, may_take, load=None):
        picked = [key for key in list(reversed(self.order()))[:limit] if may_take(key)]
        return picked, False


def always(key) -> bool:
    return True


def controller_of(policy: str, lengths=(), versions=(), readers: int = 1) -> Controller:
    """Ready groups 0, 1, ... with these numbers of tokens, or these oldest versions."""
    controller = Controller(StageNeeds("s", ("a",), policy=policy, readers=readers))
    for group_id in range(max(len(lengths), len(versions))):
        add(controller, group_id, lengths[group_id] if lengths else 0, versions[group_id] if versions else None)
    return controller


def add(controller: Controller, group_id: int, tokens: int = 0, version: int | None = None) -> None:
    controller.admit(group_id, 4, "train")
    controller.tell(group_id, Facts(version, tokens))
    assert controller.arrived(group_id)


def take(controller: Controller, limit: int, lease: int = 1, reader: str = "r", may_take=always) -> list:
    keys, _ = controller.pick("train", limit, may_take, reader)
    controller.lend(keys, lease, reader)
    return keys


# The table


@pytest.mark.parametrize("policy", POLICIES)
def test_every_entry_gives_all_keys_once(policy):
    controller = controller_of(policy, lengths=[3, 1, 4, 1, 5, 9, 2, 6])
    seen = []
    while keys := take(controller, 3):
        seen += keys
        for key in keys:
            controller.done(key)
    assert sorted(seen) == list(range(8))
    assert controller.ready("train") == []


def test_a_policy_from_outside():
    controller = controller_of(f"{__name__}:NewestFirst", [1, 1, 1])
    assert take(controller, 2) == [2, 1]


def test_a_policy_that_is_not_known_or_does_not_fit_is_refused():
    with pytest.raises(UserError, match=r"dock\.policies\.s: 'oldest' is not known; use one of: balanced, dispatch"):
        policy_of(StageNeeds("s", (), policy="oldest"), "dock.policies.s")
    with pytest.raises(UserError, match="'s' takes by row, and the policy balanced gives whole groups: use first_come"):
        policy_of(StageNeeds("s", (), "row", policy="balanced"))


# oldest_first


def test_the_oldest_version_goes_first_then_what_came_first():
    controller = controller_of("oldest_first", versions=[3, 1, None, 1, 2, None])
    assert controller.ready("train") == [1, 3, 4, 0, 2, 5]
    assert take(controller, 4) == [1, 3, 4, 0]
    controller.put_back([1, 3, 4, 0])
    add(controller, 6, version=1)
    assert controller.ready("train") == [1, 3, 6, 4, 0, 2, 5]


def test_a_version_that_changes_moves_what_waits():
    controller = controller_of("oldest_first", versions=[3, 2])
    controller.tell(0, Facts(1))
    assert controller.ready("train") == [0, 1]
    controller.tell(0, Facts(2))
    assert controller.ready("train") == [0, 1]
    controller.tell(1, Facts(None))
    assert controller.ready("train") == [0, 1]
    controller.forget(0)
    assert controller.ready("train") == [1]


def test_a_gate_that_changes_versions_is_asked_once_of_each():
    controller = controller_of("oldest_first", versions=[1, None, None, 4, None])
    asked = []

    def start(key) -> bool:
        asked.append(key)
        if key == 3:
            return False
        controller.tell(key, Facts(3))
        return True

    assert controller.pick("train", 9, start) == ([0, 1, 2, 4], True)
    assert asked == [0, 3, 1, 2, 4]
    assert controller.pick("train", 9, lambda key: False) == ([], True)


# ordered


@given(st.permutations(range(6)), st.lists(st.integers(1, 4), min_size=60, max_size=60), st.randoms())
def test_what_the_nth_take_gives_does_not_depend_on_what_was_ready_when(order, limits, draw):
    controller = Controller(StageNeeds("s", ("a",), policy="ordered"))
    for group_id in range(6):
        controller.admit(group_id, 2, "train")
    waiting, given_out = list(order), []
    for limit in limits:
        if waiting and draw.random() < 0.5:
            controller.arrived(waiting.pop())
        keys = take(controller, limit)
        assert len(keys) <= 1
        given_out += keys
        if not waiting and not keys:
            break
    assert given_out == list(range(6))


def test_the_line_waits_for_its_first_and_takes_back_what_returns():
    controller = Controller(StageNeeds("s", ("a",), policy="ordered"))
    for group_id in range(4):
        controller.admit(group_id, 2, "train")
    for group_id in (1, 2, 3):
        controller.arrived(group_id)
    assert take(controller, 9) == []
    controller.arrived(0)
    assert [take(controller, 9) for _ in range(2)] == [[0], [1]]
    controller.put_back([0])
    assert controller.pick("train", 9, lambda key: False) == ([], True)
    assert take(controller, 9) == [0]
    controller.forget(2)
    assert take(controller, 9) == [3]


# balanced


def best_load_at_least(lengths: list[int], readers: int) -> float:
    """No schedule's largest load is below this."""
    ordered = sorted(lengths, reverse=True)
    pair = 2 * ordered[readers] if len(ordered) > readers else 0
    return max(sum(lengths) / readers, ordered[0], pair)


def share_out(controller: Controller, lengths, readers: int, limit: int, draw: random.Random) -> list[int]:
    """Readers in lock step ask in any order until all is given out, and acknowledge nothing; tokens of each."""
    loads = [0] * readers
    left = len(lengths)
    while left:
        before = left
        for place in draw.sample(range(readers), readers):
            keys = take(controller, limit, place, f"r{place}")
            loads[place] += sum(lengths[key] for key in keys)
            left -= len(keys)
        assert left < before, "nobody gets what is ready"
    return loads


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 20), st.integers(0, 4000)), min_size=1, max_size=40),
    st.integers(1, 6),
    st.integers(1, 50),
    st.randoms(use_true_random=False),
)
def test_no_reader_has_more_than_half_of_the_best_schedule_too_much(lengths, readers, limit, draw):
    loads = share_out(controller_of("balanced", lengths, readers=readers), lengths, readers, limit, draw)
    best = best_load_at_least(lengths, readers)
    assert sum(loads) == sum(lengths)
    assert max(loads) <= (1.5 - 1 / (2 * readers)) * best + 1
    assert max(loads) <= sum(lengths) / readers + (1 - 1 / readers) * max(lengths) + 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 5), st.integers(1, 4))
def test_a_reader_that_has_nothing_is_never_sent_away_and_gets_the_longest(lengths, readers, limit):
    controller = controller_of("balanced", lengths, readers=readers)
    left = set(range(len(lengths)))
    while left:
        keys = take(controller, limit, reader=f"r{len(left) % readers}")
        assert lengths[keys[0]] == max(lengths[key] for key in left)
        left -= set(keys)
        for key in keys:
            controller.done(key)


def long_tailed(seed: int, count: int) -> list[int]:
    """Tokens of groups as reasoning models make them: most are short, the longest fill the whole limit."""
    lengths = np.random.default_rng(seed).lognormal(mean=8.0, sigma=1.0, size=count)
    return [int(length) for length in np.clip(lengths, 100, 32768)]


def lock_step(policy: str, seed: int) -> list[float]:
    """max/mean of the tokens of 8 readers, in each of 20 steps of 128 groups; what is left over stays for the next."""
    readers, each, ratios = 8, 16, []
    controller, lengths = controller_of(policy, readers=readers), []
    for step in range(20):
        fresh = long_tailed(100 * seed + step, readers * each)
        for tokens in fresh:
            add(controller, len(lengths), tokens)
            lengths.append(tokens)
        given_out = [take(controller, each, place, f"r{place}") for place in range(readers)]
        loads = [sum(lengths[key] for key in keys) for keys in given_out]
        ratios.append(max(loads) / statistics.mean(loads))
        for keys in given_out:
            for key in keys:
                controller.done(key)
    assert len(controller.ready("train")) < readers * each
    return ratios


def idle_readers(policy: str, seed: int) -> float:
    """When the last of 8 readers that ask for one group when they are idle ends, over the mean."""
    lengths, readers = long_tailed(seed, 128), 8
    controller = controller_of(policy, lengths, readers=readers)
    clock: list[tuple[int, int, list]] = [(0, place, []) for place in range(readers)]
    ends = [0] * readers
    while clock:
        now, place, had = heapq.heappop(clock)
        for key in had:
            controller.done(key)
        keys = take(controller, 1, place, f"r{place}")
        if keys:
            ends[place] = now + lengths[keys[0]]
            heapq.heappush(clock, (ends[place], place, keys))
    return max(ends) * readers / sum(lengths)


def test_long_tailed_lengths_are_shared_evenly_by_balanced_and_not_by_first_come():
    balanced = [ratio for seed in range(5) for ratio in lock_step("balanced", seed)]
    first_come = [ratio for seed in range(5) for ratio in lock_step("first_come", seed)]
    assert statistics.median(balanced) < 1.02
    assert max(balanced) < 1.2
    assert statistics.median(first_come) > 1.3
    idle = {policy: [idle_readers(policy, seed) for seed in range(20)] for policy in ("balanced", "first_come")}
    assert max(idle["balanced"]) < 1.05
    assert statistics.median(idle["first_come"]) > 1.1


def test_readers_that_leave_and_groups_that_leave_are_not_counted_any_more():
    controller = controller_of("balanced", [8, 4, 4, 2], readers=2)
    assert take(controller, 9, reader="a") == [0]
    controller.forget(0)
    assert take(controller, 9, reader="a") == [1]
    assert take(controller, 1, reader="a") == []
    controller.put_back([1])
    assert take(controller, 9, reader="b") == [1]
    assert take(controller, 9, reader="a") == [2]
    assert take(controller, 9, reader="a") == [3] or take(controller, 9, reader="b") == [3]


# dispatch


def samplers(lengths, readers: int = 2) -> Controller:
    """Ready groups of one sample each, for some samplers."""
    return controller_of("dispatch", lengths, readers=readers)


def ask(controller: Controller, reader: str, tokens: float = 0.0, speed: float | None = None, slots: int = 8) -> list:
    keys, _ = controller.pick("train", 1, always, reader, Load(tokens, slots, speed))
    controller.lend(keys, 1, reader)
    return keys


def test_a_sampler_stops_at_its_share_though_nobody_else_has_asked():
    controller = samplers([5, 40, 10, 25, 20])
    assert ask(controller, "a") == [1]
    assert ask(controller, "a", 40) == [2], "the longest that fits into a half of 100"
    assert ask(controller, "a", 50) == []
    assert [ask(controller, "b", left) for left in (0, 25, 45, 50)] == [[3], [4], [0], []]


def test_a_fast_sampler_has_a_larger_share_and_a_slow_one_gets_nothing_that_others_end_sooner():
    controller = samplers([30, 30, 30, 30])
    assert ask(controller, "slow", 0, 1.0) == [0], "nobody else is known"
    assert ask(controller, "fast", 0, 10.0) == [1]
    controller.done(0)
    assert ask(controller, "slow", 0, 1.0) == []
    assert [ask(controller, "fast", 30 * count, 10.0) for count in (1, 2)] == [[2], [3]]


def test_a_round_goes_before_the_next_one_and_what_came_back_before_all():
    controller = Controller(StageNeeds("s", ("a",), policy="dispatch"))
    for group_id, tokens, round_ in ((0, 5, 0), (1, 9, 1), (2, 7, 0), (3, 1, 1)):
        controller.admit(group_id, 4, "train")
        controller.tell(group_id, Facts(None, tokens, round_, 4))
        controller.arrived(group_id)
    assert controller.ready("train") == [2, 0, 1, 3]
    controller.lend([3], 1, "a")
    controller.put_back([3])
    assert controller.ready("train") == [3, 2, 0, 1]


def test_a_dead_sampler_has_no_share_until_its_successor_takes_something():
    controller = samplers([10] * 6)
    assert ask(controller, "a") == [0]
    assert ask(controller, "b") == [1]
    controller.put_back([1])
    controller.gone("b")
    controller.gone("b")
    assert [ask(controller, "a", 10 * count) for count in (1, 2, 3)] == [[1], [2], [3]]
    assert ask(controller, "b.1") == [4]
    assert ask(controller, "a", 40) == []
    assert ask(controller, "b.1", 10) == [5]


def test_what_waits_with_a_busy_sampler_is_better_with_one_that_has_nothing():
    controller = samplers([30, 20, 10])
    assert [ask(controller, "a"), ask(controller, "b"), ask(controller, "b", 20)] == [[0], [1], [2]]
    busy = Load(30.0, 8, 1.0)
    assert controller.better_elsewhere("b", [2], busy) == [], "a is at work"
    controller.done(0)
    assert controller.better_elsewhere("b", [1, 2], busy) == [2], "one for each idle sampler"
    assert controller.better_elsewhere("a", [1, 2], busy) == [], "they are not a's"
    assert controller.better_elsewhere("b", [2], Load(10.0, 800, 100.0)) == [], "b is so fast that it stays"
    add(controller, 7, tokens=5)
    assert controller.better_elsewhere("b", [2], busy) == [], "something is ready for a"


@pytest.mark.parametrize("tokens", [-1.0, math.nan, math.inf])
def test_a_reader_cannot_say_that_so_many_tokens_are_left(tokens):
    check_load(Load(0.0))
    with pytest.raises(ValueError, match="no reader can be as loaded as"):
        check_load(Load(tokens))


@pytest.mark.parametrize(("slots", "speed"), [(0, None), (1 << 32, None), (1, 0.0), (1, math.nan), (1, 1.7e308)])
def test_a_reader_cannot_say_that_it_is_so_fast(slots, speed):
    check_load(Load(0.0, 1, 1e12))
    with pytest.raises(ValueError, match="no reader can be as loaded as"):
        check_load(Load(0.0, slots, speed))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(1, 4000), min_size=1, max_size=20),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4000), st.sampled_from([None, 0.1, 1.0, 30.0])), max_size=80),
    st.randoms(use_true_random=False),
)
def test_whoever_is_refused_with_nothing_in_hand_will_hear_of_somebody_elses_end(lengths, readers, asks, draw):
    controller = samplers(lengths, readers)
    held: dict[str, list] = {}
    left = len(lengths)
    for place, tokens, speed in [*asks, *[(i % 4, 0, None) for i in range(400)]]:
        reader = f"r{place}"
        mine = held.setdefault(reader, [])
        if mine and (draw.random() < 0.5 or not tokens):
            controller.done(mine.pop(draw.randrange(len(mine))))
            left -= 1
            continue
        keys = ask(controller, reader, tokens if mine else 0.0, speed)
        mine += keys
        if not keys and not mine and controller.ready("train"):
            assert any(held[other] for other in held if other != reader), "nobody will ever move on"
    assert not left, "all is done in the end"


# What it costs


@pytest.mark.parametrize("policy", POLICIES)
def test_a_take_costs_the_same_however_much_is_ready(policy):
    """A structural test with a wide margin: a scan over 200 times the rows would be far beyond it."""

    def seconds(count: int) -> float:
        draw = random.Random(0)
        lengths = [draw.randrange(5000) for _ in range(count)]
        controller = controller_of(policy, lengths, [length % 7 for length in lengths], readers=4)
        best = float("inf")
        for lease in range(5):
            start = time.perf_counter()
            for _ in range(40):
                keys, _ = controller.pick("train", 2, always, "r")
                controller.lend(keys, lease, "r")
                controller.put_back(keys)
            best = min(best, time.perf_counter() - start)
        return best

    assert seconds(40_000) < 20 * seconds(200)


# In a dock


def test_a_dock_learns_token_counts_from_who_publishes_them(make_rig):
    stages = (StageNeeds("rollout", ("prompt",)), StageNeeds("score", ("response",), policy="balanced"))
    rig = make_rig(batch_groups=4, stages=stages)
    rig.admit(4)
    for group_id, tokens in enumerate([3, 9, 1, 7]):
        rows = [SampleId(group_id, index) for index in range(2)]
        rig.client.put(rows, {"response": [np.zeros(2, np.int32)] * 2}, tokens=[tokens, 0])
    taken = [rig.client.take("score", max_groups=1) for _ in range(4)]
    assert [batch.groups[0].group_id for batch in taken if batch] == [1, 3, 0, 2]


def test_token_counts_that_do_not_fit_the_rows_are_refused(make_rig):
    rig = make_rig()
    rig.admit(1)
    for wrong in ((1,), (1, -1), (1, 2, 3)):
        with pytest.raises(ValueError, match="token counts"):
            rig.client.put([SampleId(0, 0), SampleId(0, 1)], {"response": [np.zeros(1)] * 2}, tokens=wrong)
    assert rig.dock.ledger.in_flight == 1


def test_a_stage_that_takes_batches_has_no_policy(make_rig):
    rig = make_rig(stages=(StageNeeds("train", ("prompt",), policy="ordered"),))
    with pytest.raises(ValueError, match="takes batches: the policy 'ordered' has no effect"):
        rig.take_batch()


@pytest.mark.parametrize("policy", ["json:loads", "builtins:list"])
def test_what_is_no_policy_is_refused_by_name(policy):
    with pytest.raises(UserError, match=rf"dock\.policies\.s: '{policy}' is no policy of takes"):
        policy_of(StageNeeds("s", (), policy=policy), "dock.policies.s")
