"""Several samplers on one dock: how long a step takes with and without the dispatch by predicted lengths, in simulated
time, and that nothing is lost when samplers are slow, held or killed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any

import pytest

from tests.unit.stages.samplers_lab import BUSY, WIDE, Lab
from tranship.rollout import GroupRequest

SLOW = BUSY.times(3)
CASES: dict[str, dict[str, Any]] = {
    "few groups for 2": {"costs": [BUSY] * 2, "slots": 64, "groups": 8, "size": 8},
    "few groups for 4, one slow": {"costs": [BUSY] * 3 + [SLOW], "slots": 32, "groups": 16, "size": 8},
    "many groups for 2": {"costs": [BUSY] * 2, "slots": 32, "groups": 32, "size": 8},
    "many groups for 4, one slow": {"costs": [BUSY] * 3 + [SLOW], "slots": 32, "groups": 64, "size": 8},
    "large groups for 2": {"costs": [BUSY] * 2, "slots": 16, "groups": 8, "size": 16},
    "large groups for 2, one 8 x slower": {"costs": [BUSY, BUSY.times(8)], "slots": 16, "groups": 8, "size": 16},
    "many groups for 4 GPUs": {"costs": [WIDE] * 4, "slots": 32, "groups": 64, "size": 8},
    "many groups for 4 GPUs, one slow": {
        "costs": [WIDE] * 3 + [WIDE.times(3)],
        "slots": 32,
        "groups": 64,
        "size": 8,
    },
}
SEEDS = 4


@pytest.fixture
def lab() -> Iterator[Callable[..., Lab]]:
    opened: list[Lab] = []

    def make(**options: Any) -> Lab:
        opened.append(Lab(**options))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def measure(lab: Callable[..., Lab], case: str, **options: Any) -> tuple[float, float]:
    """(seconds, idle share), means of the second step of some runs in which every prompt comes again at each step."""
    reports = []
    for seed in range(SEEDS):
        made = lab(**{"prompts": CASES[case]["groups"], **CASES[case], **options}, seed=seed)
        made.step()
        reports.append(made.step())
    return fmean(report.makespan for report in reports), fmean(report.idle for report in reports)


# The most of the time that a step with first_come takes: with predictions, and where no prompt was seen before.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "known", "unknown"),
    [
        ("few groups for 2", 0.80, 0.90),
        ("few groups for 4, one slow", 0.65, 0.95),
        ("many groups for 2", 0.97, 1.03),
        ("many groups for 4, one slow", 0.88, 0.98),
        ("large groups for 2", 0.93, 1.03),
        ("large groups for 2, one 8 x slower", 0.70, 0.95),
        ("many groups for 4 GPUs", 0.97, 1.03),
        ("many groups for 4 GPUs, one slow", 0.88, 1.03),
    ],
)
def test_a_step_is_shorter_than_with_first_come(
    lab: Callable[..., Lab], case: str, known: float, unknown: float
) -> None:
    before, idle_before = measure(lab, case, policy="first_come")
    after, idle_after = measure(lab, case)
    blind, _ = measure(lab, case, prompts=1 << 40)
    blind_before, _ = measure(lab, case, policy="first_come", prompts=1 << 40)
    print(
        f"{case:36} first_come {before:6.1f} s, idle {idle_before:.2f}; dispatch {after:6.1f} s, "
        f"idle {idle_after:.2f}; without predictions {blind / blind_before:.2f}"
    )
    assert after < known * before
    assert blind < unknown * blind_before
    assert idle_after < idle_before + 0.1


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_group_that_stays_whole_costs_little(lab: Callable[..., Lab], case: str) -> None:
    """Even if prompts could be prefilled for nothing on every sampler, samples apart would save little."""
    whole, _ = measure(lab, case)
    apart, _ = measure(lab, case, apart=True)
    print(f"{case:36} whole {whole:6.1f} s, apart {apart:6.1f} s: {whole / apart:.2f}")
    assert whole < 1.15 * apart


def test_every_prompt_is_prefilled_once(lab: Callable[..., Lab]) -> None:
    made = lab(**CASES["many groups for 4, one slow"])
    assert made.step().prefills == 1.0


def test_the_same_seed_gives_the_same_history(lab: Callable[..., Lab]) -> None:
    first, second = (lab(**CASES["many groups for 2"], prompts=32) for _ in range(2))
    assert [first.step() for _ in range(2)] == [second.step() for _ in range(2)]


def test_groups_that_wait_at_a_busy_engine_go_to_an_idle_one(lab: Callable[..., Lab]) -> None:
    made = lab(costs=[BUSY] * 2, slots=16, groups=4, size=4)
    busy, other = made.engines
    submit = busy.submit

    def submit_after_clients(request: GroupRequest) -> None:
        # What clients of the endpoint asked for stands before it, and runs on and on.
        busy.taken = 16
        submit(request)

    busy.submit = submit_after_clients  # type: ignore[method-assign]
    made.step()
    assert (busy.prefills, other.prefills) == (0, 4)
    assert made.dock.ledger.trained == 4


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost_or_doubled_when_samplers_are_slow_held_and_killed(lab: Callable[..., Lab], seed: int) -> None:
    draw = random.Random(seed)
    costs = [BUSY.times(draw.choice([1, 1, 2, 5, 20])) for _ in range(draw.randint(2, 4))]
    made = lab(costs=costs, slots=draw.choice([4, 16]), groups=draw.randint(3, 12), size=draw.choice([1, 4, 8]))
    for step in range(3):
        start = max(engine.now for engine in made.engines)
        for _ in range(draw.randint(0, 3)):
            place = draw.randrange(len(costs))
            time = start + draw.uniform(0, 40)
            if draw.random() < 0.5:
                made.later.append((time, lambda place=place: made.kill(place)))
            else:
                made.later.append((time, lambda place=place: hold(made, place, draw.uniform(1, 200))))
        made.later.sort(key=lambda entry: entry[0])
        made.step()
        ledger = made.dock.ledger
        assert (ledger.admitted, ledger.trained, ledger.in_flight) == ((step + 1) * made.groups,) * 2 + (0,)


def hold(lab: Lab, place: int, seconds: float) -> None:
    """An engine stands still from its next step on."""
    lab.engines[place].held = (0.0, seconds)
