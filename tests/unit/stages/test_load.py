"""What a sampler says of itself: tokens that are left, slots, and steps a second."""

from __future__ import annotations

import pytest

from tranship.stages.load import LoadMeter
from tranship.types import SampleId

A, B, C = (SampleId(0, index) for index in range(3))


def test_what_runs_gets_less_and_what_waits_does_not() -> None:
    meter = LoadMeter(100)
    meter.add([A, B, C], 40)
    assert meter.load(2).tokens == 120
    meter.begin([A, B, C])
    for _ in range(10):
        meter.stepped(0.5)
    assert meter.load(2) == (30 + 30 + 40, 2, pytest.approx(2.0))
    meter.remove([A])
    meter.stepped(0.5)
    assert meter.load(2).tokens == 29 + 39
    meter.clear()
    assert meter.load(2).tokens == 0


def test_a_sample_that_outlives_its_prediction_is_expected_to_go_on_for_a_part_of_what_it_made() -> None:
    meter = LoadMeter(100)
    meter.add([A], 8)
    meter.begin([A])
    for _ in range(40):
        meter.stepped(1.0)
    assert meter.load(1).tokens == 10
    for _ in range(55):
        meter.stepped(1.0)
    assert meter.load(1).tokens == 5, "the cap"
    meter.add([B], 1000)
    assert meter.load(1).tokens == 105


def test_a_group_that_has_not_begun_is_not_counted_as_running() -> None:
    meter = LoadMeter(100)
    meter.add([A, B], 10)
    meter.stepped(1.0)
    assert meter.load(4) == (20, 4, None)


def test_the_few_tokens_of_a_batchs_end_say_little_of_the_speed() -> None:
    meter = LoadMeter(10_000)
    samples = [SampleId(1, index) for index in range(50)]
    meter.add(samples, 10)
    meter.load(64)
    meter.begin(samples)
    for _ in range(100):
        meter.stepped(0.1)
    meter.remove(samples[1:])
    for _ in range(100):
        meter.stepped(0.02)
    assert meter.load(64).speed == pytest.approx(10, rel=0.02)
